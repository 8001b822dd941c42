"""Adam and AdamW: their first steps, with a symbol for every gradient."""

import numpy as np
from symbolic import same_as
from sympy import Symbol, sqrt

from equations.sizes import positive, symbols
from numpygpt import optim
from numpygpt.module import Parameter

STEPS = 3


def series(formula, start=0):
    """Return the values at t = 0 ... STEPS: the start, then formula(t, the value before)."""
    values = [start]
    for t in range(1, STEPS + 1):
        values.append(formula(t, values[-1]))
    return np.array(values, object)


class Adam:
    of = optim.Adam
    output = "p"
    given = dict(
        g=symbols("g", STEPS + 1),  # the first one is g_0, which is never used
        p0=Symbol("p0", real=True),
        **{name: positive(name) for name in ("lr", "eps", "b1", "b2")},
    )
    held = dict(Eg=Symbol("Eg", real=True))

    def m(b1, g):
        r"""m_t = \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \tag{1}"""
        return series(lambda t, before: b1 * before + (1 - b1) * g[t])

    def v(b2, g):
        r"""v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \tag{2}"""
        return series(lambda t, before: b2 * before + (1 - b2) * g[t] ** 2)

    def m_hat(m, b1):
        r"""\hat m_t = \frac{m_t}{1 - \beta_1^t}, \qquad"""
        return series(lambda t, _: m[t] / (1 - b1**t))

    def v_hat(v, b2):
        r"""\hat v_t = \frac{v_t}{1 - \beta_2^t} \tag{3}"""
        return series(lambda t, _: v[t] / (1 - b2**t))

    def p(p0, lr, m_hat, v_hat, eps):
        r"""p \leftarrow p - \eta\, \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon} \tag{4}"""
        return series(lambda t, before: before - lr * m_hat[t] / (sqrt(v_hat[t]) + eps), p0)

    @same_as("m")
    def m_unrolled(b1, g):
        r"""m_t = (1 - \beta_1) \sum_{i=1}^t \beta_1^{t-i}\, g_i \tag{5}"""
        return series(lambda t, _: (1 - b1) * sum(b1 ** (t - i) * g[i] for i in range(1, t + 1)))

    @same_as("v")
    def v_unrolled(b2, g):
        return series(lambda t, _: (1 - b2) * sum(b2 ** (t - i) * g[i] ** 2 for i in range(1, t + 1)))

    def expected_m(m, g, Eg):
        return series(lambda t, _: sum(m[t].diff(g[i]) * Eg for i in range(1, t + 1)))  # m is linear in every g

    @same_as("expected_m")
    def expected_m_first(b1, Eg):
        r"""E[m_t] = (1 - \beta_1)\, E[g]\, \frac{1 - \beta_1^t}{1 - \beta_1}"""
        return series(lambda t, _: (1 - b1) * Eg * (1 - b1**t) / (1 - b1))

    @same_as("expected_m")
    def expected_m_is(b1, Eg):
        r"""= (1 - \beta_1^t)\, E[g] \tag{6}"""
        return series(lambda t, _: (1 - b1**t) * Eg)

    def code(g, p0, lr, eps, b1, b2):
        return run(optim.Adam, g, p0, lr=lr, eps=eps, betas=(b1, b2))


class AdamW(Adam):
    of = optim.AdamW
    given = dict(Adam.given, decay=positive("decay"))

    def p(p0, lr, decay, m_hat, v_hat, eps):
        r"""p \leftarrow p - \eta\, \lambda\, p - \eta\, \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon} \tag{1}"""
        return series(lambda t, p: p - lr * decay * p - lr * m_hat[t] / (sqrt(v_hat[t]) + eps), p0)

    def code(g, p0, lr, eps, b1, b2, decay):
        return run(optim.AdamW, g, p0, lr=lr, eps=eps, betas=(b1, b2), weight_decay=decay)


def run(optimiser, g, p0, **settings):
    """Return what a matrix of one weight becomes, and its moments, step by step."""
    weight = Parameter(np.full((1, 1), p0))
    steps = optimiser([weight], **settings)
    seen = [(p0, 0.0, 0.0)]
    for t in range(1, STEPS + 1):
        weight.grad[...] = g[t]
        steps.step()
        seen.append((weight.value.item(), steps.m[0].item(), steps.v[0].item()))
    return dict(zip(("p", "m", "v"), np.transpose(seen), strict=True))
