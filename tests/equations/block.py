"""The block: its residual paths, for sublayers and norms of which nothing is known but their Jacobians."""

import numpy as np
from symbolic import gradient, table
from sympy import Function

from equations.sizes import symbols
from numpygpt import TransformerConfig, layers
from numpygpt.module import Module


class AnyMap:
    """A map of two features of which nothing is known but that it has a Jacobian."""

    def __init__(self, name):
        self.slopes = table(lambda i, k: Function(f"{name}{i}_by_{k}"), 2, 2)
        self.components = [
            type(f"{name}{i}", (Function,), {"fdiff": lambda f, k=1, i=i: self.slopes[i, k - 1](*f.args)})
            for i in range(2)
        ]

    def __call__(self, x):
        return table(lambda i: self.components[i](*x), 2)

    def J(self, x):
        return table(lambda i, k: self.slopes[i, k](*x), 2, 2)


class Squares:
    """A map to compute with: the squares of A x."""

    def __init__(self, *rows):
        self.A = np.array(rows)

    def __call__(self, x):
        return (self.A @ x) ** 2

    def J(self, x):
        return 2 * (self.A @ x)[:, None] * self.A


class Sublayer(Module):
    """A map in the place of a sublayer or norm, for a sequence of one position."""

    def __init__(self, function):
        self.function = function

    def forward(self, x, *_):
        self.saved = x[0]
        return self.function(x[0])[None]

    def backward(self, dy):
        return dy @ self.function.J(self.saved)


class DecoderBlock:
    of = layers.DecoderBlock
    given = dict(
        x=symbols("x", 2),
        f=Squares([1, 2], [3, -1]),
        n=Squares([2, 0], [1, 1]),
        dy_pre=symbols("dy_pre", 2),
        dy_post=symbols("dy_post", 2),
    )
    held = dict(f=AnyMap("f"), n=AnyMap("n"))

    def y_pre(x, f, n):
        r"""\text{pre:}\quad y = x + f(n(x)) \tag{1}"""
        return x + f(n(x))

    def z(x, f):
        return x + f(x)

    def y_post(n, z):
        r"""\text{post (the original of 2017):}\quad y = n(x + f(x)) \tag{2}"""
        return n(z)

    @gradient("x", of=["y_pre"])
    def dx_pre(dy_pre, n, f, x):
        r"""\text{pre:}\quad \bar x = \bar y + J_n^\top J_f^\top\, \bar y \tag{3}"""
        return dy_pre + n.J(x).T @ f.J(n(x)).T @ dy_pre

    @gradient("z", of=["y_post"])
    def dz(n, z, dy_post):
        r"""\text{post:}\quad \bar z = J_n^\top \bar y, \qquad"""
        return n.J(z).T @ dy_post

    @gradient("x", of=["y_post"])
    def dx_post(dz, f, x):
        r"""\bar x = \bar z + J_f^\top \bar z \tag{4}"""
        return dz + f.J(x).T @ dz

    def code(x, f, n, dy_pre, dy_post):
        """Ask the first half of a block; the second one is two identities and two zeros."""
        config = TransformerConfig(vocab_size=2, context_length=2, d_model=2, num_layers=1, num_heads=1, d_ff=2)
        block = layers.DecoderBlock(config, dtype=np.float64)
        block.ln1, block.attn = Sublayer(n), Sublayer(f)
        block.ln2, block.ffn = layers.activation.Identity(), layers.Linear(2, 2, std=0, dtype=np.float64)
        answers = {}
        for place, dy in ("pre", dy_pre), ("post", dy_post):
            block.pre = place == "pre"
            answers[f"y_{place}"], answers[f"dx_{place}"] = block(x[None])[0], block.backward(dy[None])[0]
        return answers
