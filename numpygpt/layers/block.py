r"""A decoder block: attention, then feed-forward, each beside a residual path and with its norm."""

import numpy as np
from jaxtyping import Bool, Float, Integer

from numpygpt.array import Array
from numpygpt.cache import LayerCache
from numpygpt.config import TransformerConfig
from numpygpt.init import Seed
from numpygpt.layers.attention import MultiHeadAttention
from numpygpt.layers.dropout import Dropout
from numpygpt.layers.feedforward import GLU, FeedForward
from numpygpt.layers.norm import LayerNorm, RMSNorm
from numpygpt.layers.position import RotaryPositionalEmbedding
from numpygpt.module import Module

GATES = {"glu": "sigmoid", "bilinear": "identity", "reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def make_norm(config: TransformerConfig, dtype: np.typing.DTypeLike) -> Module:
    """Return a new norm as the config has it."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_eps, dtype=dtype)
    return LayerNorm(config.d_model, config.norm_eps, config.bias, dtype=dtype)


def make_ffn(config: TransformerConfig, dtype: np.typing.DTypeLike, rng: Seed) -> Module:
    """Return a new feed-forward layer as the config has it."""
    if config.ffn in GATES:
        return GLU(config.d_model, config.d_ff, GATES[config.ffn], config.bias, dtype=dtype, rng=rng)
    return FeedForward(config.d_model, config.d_ff, config.ffn, config.bias, dtype=dtype, rng=rng)


def make_rope(config: TransformerConfig, dtype: np.typing.DTypeLike) -> RotaryPositionalEmbedding:
    """Return a new RoPE as the config has it."""
    d_k = config.d_model // config.num_heads
    length, layout, scaling = config.context_length, config.rope_layout, config.rope_scaling
    return RotaryPositionalEmbedding(config.rope_theta, d_k, length, layout, scaling, dtype=dtype)


class DecoderBlock(Module):
    r"""$x + \mathrm{attn}(\mathrm{norm}(x))$, then the same with the feed-forward layer.

    Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.1; the residual is He et al. (2015),
    arXiv:1512.03385, eq. 1; the two places of the norm are compared by Xiong et al. (2020), arXiv:2002.04745, table
    1. Dropout acts on what each sublayer adds (Vaswani, section 5.4).

    **Forward.** Each half, with sublayer $f$ (attention or feed-forward, and the dropout behind it) and norm $n$, is

    $$\text{pre:}\quad y = x + f(n(x)) \tag{1}$$
    $$\text{post (the original of 2017):}\quad y = n(x + f(x)) \tag{2}$$

    **Backward.** In a sum $y = x + z$, $\partial y_c/\partial x_k = \partial y_c/\partial z_k = \delta_{ck}$: both
    terms get the whole cotangent. $x$ is used twice, and the gradients of two uses add. With $J_f^\top \bar y$
    written for $f$'s backward,

    $$\text{pre:}\quad \bar x = \bar y + J_n^\top J_f^\top\, \bar y \tag{3}$$
    $$\text{post:}\quad \bar z = J_n^\top \bar y, \qquad \bar x = \bar z + J_f^\top \bar z \tag{4}$$

    **Reading.** With the norm before, the cotangent of the last block reaches the first one untouched, through the
    first term of (3) in every block, whatever the sublayers do. With the norm behind, it passes $J_n$ twice a block,
    and is scaled each time.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rope: RotaryPositionalEmbedding | None = None,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        rng = np.random.default_rng(rng)
        if rope is None and config.positions == "rope":
            rope = make_rope(config, dtype)
        self.pre = config.norm_position == "pre"
        self.ln1 = make_norm(config, dtype)
        self.attn = MultiHeadAttention(
            config.d_model, config.num_heads, config.num_kv_heads, rope, config.bias, dtype=dtype, rng=rng
        )
        self.dropout1 = Dropout(config.dropout, rng.spawn(1)[0])
        self.ln2 = make_norm(config, dtype)
        self.ffn = make_ffn(config, dtype, rng)
        self.dropout2 = Dropout(config.dropout, rng.spawn(1)[0])

    def forward(
        self,
        x: Float[Array, "... seq d_model"],
        token_positions: Integer[Array, "... seq"] | None = None,
        mask: Bool[Array, "... seq keys"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Array, "... seq d_model"]:
        """Return the block's output; arguments as for MultiHeadAttention."""
        attn, ffn, drop1, drop2 = self.attn, self.ffn, self.dropout1, self.dropout2
        if self.pre:
            x = x + drop1.forward(attn.forward(self.ln1.forward(x), token_positions, mask, cache))  # (1)
            x = x + drop2.forward(ffn.forward(self.ln2.forward(x)))  # (1)
        else:
            x = self.ln1.forward(x + drop1.forward(attn.forward(x, token_positions, mask, cache)))  # (2)
            x = self.ln2.forward(x + drop2.forward(ffn.forward(x)))  # (2)
        if cache is not None:
            del (drop2 if self.pre else self.ln2).saved  # where backward begins: refused before it adds anything
        return x

    def backward(self, dy: Float[Array, "... seq d_model"]) -> Float[Array, "... seq d_model"]:
        """Add the gradients of all parameters; return that of x."""
        attn, ffn, drop1, drop2 = self.attn, self.ffn, self.dropout1, self.dropout2
        if self.pre:
            dx = dy + self.ln2.backward(ffn.backward(drop2.backward(dy)))  # (3)
            dx = dx + self.ln1.backward(attn.backward(drop1.backward(dx)))  # (3)
        else:
            dz = self.ln2.backward(dy)  # (4)
            dx = dz + ffn.backward(drop2.backward(dz))  # (4)
            dz = self.ln1.backward(dx)  # (4)
            dx = dz + attn.backward(drop1.backward(dz))  # (4)
        return dx
