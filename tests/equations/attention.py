"""Attention: of one head, also where a query sees no key, and of many that share keys and values."""

import numpy as np
from symbolic import gradient, same_as, table, value
from sympy import Integer, oo, sqrt

from equations.position import RoPE
from equations.sizes import T, positive, symbols
from equations.softmax import Softmax
from numpygpt import layers


class Attention:
    of = layers.ScaledDotProductAttention
    output = "o"
    given = dict(  # 2 queries, 3 keys
        q=symbols("q", 2, 2), k=symbols("k", 3, 2), v=symbols("v", 3, 2), d_k=Integer(2), do=symbols("do", 2, 2)
    )
    cases = {
        "all visible": dict(visible=np.ones((2, 3), bool)),
        "a query that sees no key": dict(visible=np.array([[False, False, False], [True, False, True]])),
    }

    def a(d_k, q, k):
        r"""a_{ts} = \frac{1}{\sqrt{d_k}} \sum_d q_{td}\, k_{sd} \tag{1}"""
        return table(lambda t, s: 1 / sqrt(d_k) * sum(q[t, d] * k[s, d] for d in range(q.shape[1])), len(q), len(k))

    def m(a, visible):
        r"""m_{ts} = a_{ts} \text{ if query } t \text{ may see key } s, \quad -\infty \text{ if not} \tag{2}"""
        return table(lambda t, s: a[t, s] if visible[t, s] else -oo, *a.shape)

    def M(m):
        r"""M_t = \max_s m_{ts}, \qquad"""
        return np.zeros(len(m), int)  # Softmax, whose equations these are, holds the maximum fixed, at any value

    def e(m, M):
        r"""e_{ts} = e^{m_{ts} - M_t}, \qquad"""
        return np.array([value(Softmax, "e", dict(x=m_t, M=M_t)) for m_t, M_t in zip(m, M, strict=True)])

    def Z(e):
        r"""Z_t = \sum_s e_{ts}, \qquad"""
        return np.array([sum(e_t) or 1 for e_t in e])

    @same_as("softmax")
    def p(e, Z):
        r"""p_{ts} = e_{ts} / Z_t \tag{3}"""
        return table(lambda t, s: e[t, s] / Z[t], *e.shape)

    def softmax(m):
        return np.array([value(Softmax, "p", dict(x=m_t, M=0)) for m_t in m])

    def o(p, v):
        r"""o_{te} = \sum_s p_{ts}\, v_{se}"""
        return table(lambda t, e: sum(p[t, s] * v[s, e] for s in range(len(v))), len(p), v.shape[1])

    @same_as("o")
    def o_undivided(e, Z, v):
        r"""= \frac{1}{Z_t} \sum_s e_{ts}\, v_{se} \tag{4}"""
        return table(lambda t, c: 1 / Z[t] * sum(e[t, s] * v[s, c] for s in range(len(v))), len(e), v.shape[1])

    def do_z(do, Z):
        return table(lambda t, e: do[t, e] / Z[t], *do.shape)

    @gradient("v")
    def dv_first(p, do):
        r"""\bar v_{se} = \sum_t p_{ts}\, \bar o_{te}"""
        return table(lambda s, e: sum(p[t, s] * do[t, e] for t in range(len(p))), p.shape[1], do.shape[1])

    @gradient("v")
    def dv(e, do_z):
        r"""= \sum_t e_{ts}\, \tilde o_{te} \tag{5}"""
        return table(lambda s, c: sum(e[t, s] * do_z[t, c] for t in range(len(e))), e.shape[1], do_z.shape[1])

    @gradient("p")
    def dp(do, v):
        r"""\bar p_{ts} = \sum_e \bar o_{te}\, v_{se}"""
        return table(lambda t, s: sum(do[t, e] * v[s, e] for e in range(v.shape[1])), len(do), len(v))

    @gradient("p")
    def dp_again(Z, do_z, v):
        r"""= Z_t \sum_e \tilde o_{te}\, v_{se} \tag{6}"""
        return table(lambda t, s: Z[t] * sum(do_z[t, e] * v[s, e] for e in range(v.shape[1])), len(do_z), len(v))

    def average(p, dp):
        r"""\sum_s p_{ts}\, \bar p_{ts}"""
        return np.array([sum(p_t * dp_t) for p_t, dp_t in zip(p, dp, strict=True)])

    @same_as("average")
    def average_first(do, p, v):
        r"""= \sum_e \bar o_{te} \sum_s p_{ts}\, v_{se}"""
        return np.array([sum(do[t] * (p[t] @ v)) for t in range(len(do))])

    @same_as("average")
    def average_of_outputs(do, o):
        r"""= \sum_e \bar o_{te}\, o_{te} \tag{7}"""
        return np.array([sum(do_t * o_t) for do_t, o_t in zip(do, o, strict=True)])

    @gradient("m")
    def dm_first(p, dp):
        r"""\bar m_{ts} = p_{ts}\Big(\bar p_{ts} - \sum_{s'} p_{ts'}\, \bar p_{ts'}\Big)"""
        return table(lambda t, s: p[t, s] * (dp[t, s] - sum(p[t, z] * dp[t, z] for z in range(p.shape[1]))), *p.shape)

    @gradient("m")
    def dm(e, do_z, v, o):
        r"""= e_{ts} \Big(\sum_e \tilde o_{te}\, v_{se} - \sum_e \tilde o_{te}\, o_{te}\Big) \tag{8}"""
        return table(lambda t, s: e[t, s] * (sum(do_z[t] * v[s]) - sum(do_z[t] * o[t])), *e.shape)

    @gradient("a")
    def da(dm):
        return dm

    @gradient("q")
    def dq(d_k, da, k, q):
        r"""\bar q_{td} = \frac{1}{\sqrt{d_k}} \sum_s \bar a_{ts}\, k_{sd} \tag{9}"""
        return table(lambda t, d: 1 / sqrt(d_k) * sum(da[t, s] * k[s, d] for s in range(len(k))), *q.shape)

    @gradient("k")
    def dk(d_k, da, q, k):
        r"""\bar k_{sd} = \frac{1}{\sqrt{d_k}} \sum_t \bar a_{ts}\, q_{td} \tag{10}"""
        return table(lambda s, d: 1 / sqrt(d_k) * sum(da[t, s] * q[t, d] for t in range(len(q))), *k.shape)

    def code(q, k, v, visible, do):
        layer = layers.ScaledDotProductAttention()
        o = layer(q, k, v, visible)
        return {"o": o, **dict(zip(("dq", "dk", "dv"), layer.backward(do), strict=True))}


H, G, R, d_k = 4, 2, 2, 2  # query heads, key/value heads, query heads that share one of those, features of a head


class MultiHeadAttention:
    of = layers.MultiHeadAttention
    output = "y"
    given = dict(
        x=symbols("x", T, H * d_k),
        Wq=symbols("Wq", H * d_k, H * d_k),
        Wk=symbols("Wk", G * d_k, H * d_k),
        Wv=symbols("Wv", G * d_k, H * d_k),
        Wo=symbols("Wo", H * d_k, H * d_k),
        dy=symbols("dy", T, H * d_k),
        position=np.array([Integer(1), Integer(3)]),
        theta=positive("theta"),
        mask=np.array([[True, True], [True, True]]),
        width=Integer(d_k),
    )

    def q(Wq, x):
        r"""q = W_q x, \qquad"""
        return x @ Wq.T

    def k(Wk, x):
        r"""k = W_k x, \qquad"""
        return x @ Wk.T

    def v(Wv, x):
        r"""v = W_v x \tag{1}"""
        return x @ Wv.T

    def q_split(q):
        r"""q_{gtrd} = q_{t,\,(gR + r)\,d_k + d}, \qquad"""
        return table(lambda g, t, r, d: q[t, (g * R + r) * d_k + d], G, T, R, d_k)

    def k_split(k):
        r"""k_{gsd} = k_{s,\,g\,d_k + d}, \qquad"""
        return table(lambda g, s, d: k[s, g * d_k + d], G, T, d_k)

    def v_split(v):
        r"""v_{gsd} = v_{s,\,g\,d_k + d} \tag{2}"""
        return table(lambda g, s, d: v[s, g * d_k + d], G, T, d_k)

    def q_turned(turn, q_split):
        r"""q' = \mathrm{RoPE}(q), \qquad"""
        return turn("y", q_split)

    def k_turned(turn, k_split):
        r"""k' = \mathrm{RoPE}(k) \tag{3}"""
        return turn("y", k_split)

    def turn(position, theta):
        known = RoPE.given | dict(t_=position, theta=theta, d_k=d_k, layout="half", kind=None)

        def by(quantity, z):
            heads = np.moveaxis(z.reshape(G, T, -1, d_k), 1, 2)
            turned = [[value(RoPE, quantity, dict(known, x=head, dy=head)) for head in group] for group in heads]
            return np.moveaxis(np.array(turned), 2, 1).reshape(z.shape)

        return by

    def visible(position, mask):
        r"""\text{visible}_{ts} = \big[\mathrm{position}(s) \le \mathrm{position}(t)\big]
        \wedge \text{mask}_{ts} \tag{4}"""
        return table(lambda t, s: bool(position[s] <= position[t] and mask[t, s]), T, T)

    def groups(q_turned, k_turned, v_split, visible, width):
        known = dict(d_k=width, visible=np.repeat(visible, R, axis=0))
        return [dict(known, q=q_turned[g].reshape(T * R, d_k), k=k_turned[g], v=v_split[g]) for g in range(G)]

    def o(groups):
        r"""o_{g,(tr),d} = \mathrm{attention}\big(q'_{g,(tr),d},\; k'_{gsd},\; v_{gsd},\;
        \text{visible}_{ts}\big) \tag{5}"""
        return np.array([value(Attention, "o", dict(known)) for known in groups]).reshape(G, T, R, d_k)

    def o_merged(o):
        r"""o_{t,\,(gR + r)\,d_k + d} = o_{gtrd}, \qquad"""
        return table(lambda t, c: o[c // d_k // R, t, c // d_k % R, c % d_k], T, H * d_k)

    def y(Wo, o_merged):
        r"""y = W_o\, o \tag{6}"""
        return o_merged @ Wo.T

    @gradient("o_merged")
    def do_merged(Wo, dy):
        return dy @ Wo

    @gradient("o")
    def do(do_merged):
        r"""\bar o_{gtrd} = \bar o_{t,\,(gR + r)\,d_k + d} \tag{7}"""
        return table(lambda g, t, r, d: do_merged[t, (g * R + r) * d_k + d], G, T, R, d_k)

    def handed_back(groups, do):
        def gradients(name):
            return [value(Attention, name, dict(groups[g], do=do[g].reshape(T * R, d_k))) for g in range(G)]

        return gradients

    @gradient("q_turned", of=["o"], beside=["k_turned", "v_split"])
    def dq_turned(handed_back):
        return np.array(handed_back("dq")).reshape(G, T, R, d_k)

    @gradient("k_turned", of=["o"], beside=["q_turned", "v_split"])
    def dk_turned(handed_back):
        return np.array(handed_back("dk"))

    @gradient("v_split", of=["o"], beside=["q_turned", "k_turned"])
    def dv_split(handed_back):
        return np.array(handed_back("dv"))

    @gradient("q_split", of=["q_turned"])
    def dq_split(turn, dq_turned):
        r"""\bar q = \mathrm{RoPE}^{-1}(\bar q'), \qquad"""
        return turn("dx", dq_turned)

    @gradient("k_split", of=["k_turned"])
    def dk_split(turn, dk_turned):
        r"""\bar k = \mathrm{RoPE}^{-1}(\bar k') \tag{8}"""
        return turn("dx", dk_turned)

    @gradient("q", of=["q_split"])
    def dq(dq_split):
        r"""\bar q_{t,\,(gR + r)\,d_k + d} = \bar q_{gtrd}, \qquad"""
        return MultiHeadAttention.o_merged(dq_split)

    @gradient("k", of=["k_split"])
    def dk(dk_split):
        r"""\bar k_{s,\,g\,d_k + d} = \bar k_{gsd}, \qquad"""
        return table(lambda s, c: dk_split[c // d_k, s, c % d_k], T, G * d_k)

    @gradient("v", of=["v_split"])
    def dv(dv_split):
        r"""\bar v_{s,\,g\,d_k + d} = \bar v_{gsd} \tag{9}"""
        return table(lambda s, c: dv_split[c // d_k, s, c % d_k], T, G * d_k)

    @gradient("x", of=["q", "k", "v"])
    def dx(Wq, dq, Wk, dk, Wv, dv):
        r"""\bar x = W_q^\top \bar q + W_k^\top \bar k + W_v^\top \bar v \tag{10}"""
        return dq @ Wq + dk @ Wk + dv @ Wv

    def code(x, Wq, Wk, Wv, Wo, dy, position, theta, mask):
        rope = layers.RotaryPositionalEmbedding(theta, d_k, 4, "half", dtype=np.float64)
        layer = layers.MultiHeadAttention(H * d_k, H, G, rope, dtype=np.float64)
        layer.q_proj.weight.value, layer.k_proj.weight.value, layer.v_proj.weight.value = Wq, Wk, Wv
        layer.output_proj.weight.value = Wo
        return {"y": layer(x, position.astype(int), mask), "dx": layer.backward(dy)}
