"""The proofs can fail: a wrong formula is not proved, and a wrong forward is not what the code computes."""

import equations as eq
import numpy as np
import pytest
from equations.activation import sigma
from equations.attention import G, R, d_k
from equations.feedforward import each
from equations.optim import series
from equations.position import in_place
from equations.sizes import D, F, N, T, V
from symbolic import all_zero, cases, claims, delta, differences, remainder, some_nonzero, table, value
from sympy import cos, exp, sin, sqrt


def wrong(what, place, formula, in_place_of=None):
    """Return a parameter: a claim, the quantity to replace (itself, unless another is named), and by what."""
    c, claim = place
    return pytest.param(c, claim, in_place_of or claim, formula, id=f"{c.__name__}.{claim}: {what}")


def r_of(eps, x):
    return eq.RMSNorm.r(eps, x)


def turned(R, phi, dy1, dy2, pairs):
    return in_place(eq.RoPE.y_pairs(R, phi, dy1, dy2), pairs)


def by_r_and_g(z):
    return table(lambda g, r, t, d: z[t, (r * G + g) * d_k + d], G, R, T, d_k)


def by_one_head(groups, do):
    heads = [dict(known, q=known["q"][:T], visible=known["visible"][:T], do=do[g, 0]) for g, known in enumerate(groups)]
    return np.array([value(eq.Attention, "dk", head) for head in heads])


WRONG = [
    wrong("without its factor", (eq.LoRALinear, "dA"), lambda dh, x: dh.T @ x),
    wrong("its factor twice", (eq.LoRALinear, "dB"), lambda gamma, dy, h: gamma * dy.T @ h),
    wrong("the adapter's path dropped", (eq.LoRALinear, "dx"), lambda dy, W: dy @ W),
    wrong("W's path dropped", (eq.LoRALinear, "dx"), lambda gamma, dh, A: gamma * dh @ A),
    wrong("merged without the factor", (eq.LoRALinear, "y_merged"), lambda W, B, A: W + B @ A, in_place_of="M"),
    wrong("one position only", (eq.Linear, "dW"), lambda dy, x: np.outer(dy[0], x[0])),
    wrong("one output only", (eq.Linear, "dx"), lambda dy, W: np.outer(dy[:, 0], W[0])),
    wrong("every output by every bias", (eq.Linear, "dy_db"), lambda b: table(lambda n, o, p: 1, N, F, F)),
    wrong("the last of equal ids only", (eq.Embedding, "dW_scattered"), lambda dy: np.array([dy[1], 0 * dy[0], dy[2]])),
    wrong("the row before", (eq.Embedding, "row"), lambda v_, W: W[v_ - 1]),
    wrong("the term along h dropped", (eq.RMSNorm, "dx"), lambda r, dh: r[:, None] * dh),
    wrong("its sign flipped", (eq.RMSNorm, "dx"), lambda r, dh, s, h: r[:, None] * (dh + s[:, None] * h)),
    wrong("s not divided by D", (eq.RMSNorm, "dx"), lambda dh, h: np.sum(dh * h, axis=1), in_place_of="s"),
    wrong("s of the other position", (eq.RMSNorm, "dx"), lambda dh, h: np.mean(dh * h, axis=1)[::-1], in_place_of="s"),
    wrong("r squared", (eq.RMSNorm, "dx"), lambda r, dh, s, h: r[:, None] ** 2 * (dh - s[:, None] * h)),
    wrong("eps outside the root", (eq.RMSNorm, "dx"), lambda eps, x: 1 / (eps + r_of(0, x) ** -1), in_place_of="r"),
    wrong("x for h", (eq.RMSNorm, "dw"), lambda dy, x: np.sum(dy * x, axis=0)),
    wrong(
        "k for c",
        (eq.RMSNorm, "dh_dx"),
        lambda r, h: table(lambda n, k, c: r[n] * (delta(k, c) - h[n, k] ** 2 / D), N, D, D),
    ),
    wrong("m dropped", (eq.LayerNorm, "dx"), lambda r, dh, s, h: r[:, None] * (dh - s[:, None] * h)),
    wrong("s dropped", (eq.LayerNorm, "dx"), lambda r, dh, m: r[:, None] * (dh - m[:, None])),
    wrong("m of dy", (eq.LayerNorm, "dx"), lambda dy: np.mean(dy, axis=1), in_place_of="m"),
    wrong("divided by D - 1", (eq.LayerNorm, "du"), lambda dh, h: np.sum(dh * h, axis=1) / 2, in_place_of="s"),
    wrong("the average dropped", (eq.Softmax, "dx"), lambda p, dp: p * dp),
    wrong("every score has the same weight", (eq.Softmax, "dx"), lambda p, dp: p * (dp - np.mean(dp))),
    wrong("s for k", (eq.Softmax, "dp_dx"), lambda p: table(lambda k, s: p[s] * (delta(k, s) - p[s]), D, D)),
    wrong("+ for -", (eq.Softmax, "dp_dx"), lambda p: table(lambda k, s: p[s] * (delta(k, s) + p[k]), D, D)),
    wrong("not divided by N", (eq.CrossEntropy, "dx"), lambda a, dL, dell_dx: (a * dL)[:, None] * dell_dx),
    wrong("the ignored count", (eq.CrossEntropy, "dx"), lambda a, dL, dell_dx: dL * dell_dx / sum(a)),
    wrong("the target not taken off", (eq.CrossEntropy, "dell_dx"), lambda p: p),
    wrong("+ for -", (eq.CrossEntropy, "dell_dx"), lambda p, y: p + np.eye(V, dtype=int)[y]),
    wrong("f for f'", (eq.Activation, "dx"), lambda dy, y: dy * y),
    wrong("passes all", (eq.ReLU, "slope"), lambda x: 1),
    wrong("passes none", (eq.ReLU, "slope"), lambda x: 0),
    wrong("+ for -", (eq.Sigmoid, "slope"), lambda y: y * (1 + y)),
    wrong("y of x", (eq.Sigmoid, "slope"), lambda x: x * (1 - x)),
    wrong("x dropped", (eq.SiLU, "slope"), lambda x: sigma(x) * (2 - sigma(x))),
    wrong("second term dropped", (eq.SiLU, "slope"), lambda x: sigma(x)),
    wrong("second term dropped", (eq.GELU, "slope"), lambda cdf: cdf),
    wrong("x dropped", (eq.GELU, "slope"), lambda cdf, pdf: cdf + pdf),
    wrong("not divided by the root", (eq.GELU, "slope"), lambda x: exp(-(x**2) / 2), in_place_of="pdf"),
    wrong("b for 3 b", (eq.GELUByTanh, "du_dx"), lambda a, b, x: a * (1 + b * x**2)),
    wrong(
        "tau not squared",
        (eq.GELUByTanh, "slope"),
        lambda tau, x, du_dx: (1 + tau + x * (1 - tau) * du_dx) / 2,
    ),
    wrong("f' dropped", (eq.FeedForward, "du"), lambda dh: dh),
    wrong("f' of h", (eq.FeedForward, "du"), lambda dh, f1, h: dh * each(f1, h)),
    wrong("the value's path dropped", (eq.GLU, "dx"), lambda W1, du: W1.T @ du),
    wrong("the gate's path dropped", (eq.GLU, "dx"), lambda W3, dv: W3.T @ dv),
    wrong("the factors exchanged", (eq.GLU, "dv"), lambda dh, v: dh * v),
    wrong("f' dropped", (eq.SwiGLU, "du"), lambda dg: dg),
    wrong("not scaled", (eq.Dropout, "dx"), lambda m, dy: m * dy),
    wrong("the others pass", (eq.Dropout, "dx"), lambda m, p, dy: (1 - m) / (1 - p) * dy),
    wrong("scaled by 1/p", (eq.Dropout, "expected_y_is"), lambda p, x: x * (1 - p) / p),
    wrong("P added", (eq.SinusoidalPositions, "dx"), lambda dy, P: dy + P),
    wrong("one sequence only", (eq.LearnedPositions, "dP"), lambda dy: np.array([dy[1], 0 * dy[0], dy[2]])),
    wrong("turned on", (eq.RoPE, "dx"), lambda R, phi, dy1, dy2, pairs: turned(R, phi, dy1, dy2, pairs)),
    wrong(
        "the other sign",
        (eq.RoPE, "dx1"),
        lambda phi, dy1, dy2: table(lambda *i: cos(phi[i]) * dy1[i] - sin(phi[i]) * dy2[i], *phi.shape),
    ),
    wrong("the sum dropped", (eq.Attention, "dm"), lambda p, dp: p * dp),
    wrong("its sign flipped", (eq.Attention, "dm"), lambda p, dp: p * (dp + np.sum(dp * p, axis=1, keepdims=True))),
    wrong("the sum over queries", (eq.Attention, "dm"), lambda p, dp: p * (dp - np.sum(dp * p, axis=0))),
    wrong("not divided by the root of d_k", (eq.Attention, "dq"), lambda da, k: da @ k),
    wrong("divided by d_k", (eq.Attention, "dk"), lambda d_k, da, q: da.T @ q / d_k),
    wrong("one query only", (eq.Attention, "dv"), lambda p, do: np.outer(p[0], do[0])),
    wrong("p for the scores' gradient", (eq.Attention, "dq"), lambda d_k, p, k: p @ k / sqrt(d_k)),
    wrong("v's path dropped", (eq.MultiHeadAttention, "dx"), lambda Wq, dq, Wk, dk: dq @ Wq + dk @ Wk),
    wrong("not turned back", (eq.MultiHeadAttention, "dq_split"), lambda dq_turned: dq_turned),
    wrong("turned on", (eq.MultiHeadAttention, "dk_split"), lambda turn, dk_turned: turn("y", dk_turned)),
    wrong("heads in the order (r, g)", (eq.MultiHeadAttention, "do"), lambda do_merged: by_r_and_g(do_merged)),
    wrong("one head of a group only", (eq.MultiHeadAttention, "dk_turned"), lambda groups, do: by_one_head(groups, do)),
    wrong("Wo not transposed", (eq.MultiHeadAttention, "do_merged"), lambda Wo, dy: dy @ Wo.T),
    wrong("the residual dropped", (eq.DecoderBlock, "dx_pre"), lambda dy_pre, f, n, x: n.J(x).T @ f.J(n(x)).T @ dy_pre),
    wrong("J_f first", (eq.DecoderBlock, "dx_pre"), lambda dy_pre, f, n, x: dy_pre + f.J(n(x)).T @ n.J(x).T @ dy_pre),
    wrong("dy for dz", (eq.DecoderBlock, "dx_post"), lambda dz, f, x, dy_post: dz + f.J(x).T @ dy_post),
    wrong("one power too many", (eq.Adam, "m_unrolled"), lambda b1, m: b1 * m),
    wrong("g for its square", (eq.Adam, "v_unrolled"), lambda b2, g: eq.Adam.m_unrolled(b2, g)),
    wrong("one step late", (eq.Adam, "expected_m_is"), lambda b1, Eg: series(lambda t, _: (1 - b1 ** (t - 1)) * Eg)),
]


def mistaken(c, name, formula):
    """Return the class with another formula, which claims what the right one does."""
    vars(formula).update(vars(getattr(c, name)))
    return type(c.__name__, (c,), {name: formula})


@pytest.mark.parametrize(("c", "claim", "in_place_of", "formula"), WRONG)
def test_a_wrong_formula_is_disproved_and_not_proved(c, claim, in_place_of, formula):
    changed = mistaken(c, in_place_of, formula)
    remainders = [remainder(changed, claim, known) for known in cases(c).values()]
    assert any(some_nonzero(r) for r in remainders) and not all(all_zero(r) for r in remainders)


def test_every_class_has_its_wrong_formulas():
    assert {case.values[0] for case in WRONG} | {eq.AdamW} == {c for c in vars(eq).values() if has_claims(c)}


def has_claims(c):
    return hasattr(c, "of") and bool(claims(c))


FORWARD = [
    wrong("not scaled", (eq.Attention, "a"), lambda q, k: q @ k.T),
    wrong("no mask", (eq.Attention, "m"), lambda a: a),
    wrong("no causal mask", (eq.MultiHeadAttention, "visible"), lambda mask: mask),
    wrong("a key sees later queries", (eq.MultiHeadAttention, "visible"), lambda: np.tri(T, dtype=bool).T),
    wrong("heads in the order (r, g)", (eq.MultiHeadAttention, "q_split"), lambda q: by_r_and_g(q)),
    wrong("the ignored count", (eq.CrossEntropy, "L"), lambda a, ell: sum(a * ell) / len(a)),
    wrong("eps outside the root", (eq.RMSNorm, "r"), lambda eps, x: 1 / (eps + 1 / r_of(0, x))),
    wrong(
        "eps in the root", (eq.Adam, "p"), lambda p0, lr, m_hat, v_hat, eps: eq.Adam.p(p0, lr, m_hat, v_hat + eps**2, 0)
    ),
    wrong("not corrected", (eq.Adam, "p"), lambda p0, lr, m, v, eps: eq.Adam.p(p0, lr, m, v, eps)),
    wrong("no decay", (eq.AdamW, "p"), lambda p0, lr, m_hat, v_hat, eps: eq.Adam.p(p0, lr, m_hat, v_hat, eps)),
]


@pytest.mark.parametrize(("c", "claim", "in_place_of", "formula"), FORWARD)
def test_a_wrong_forward_is_not_what_the_code_computes(c, claim, in_place_of, formula):
    changed = mistaken(c, in_place_of, formula)
    assert any(differences(changed, known) for known in cases(c).values())
