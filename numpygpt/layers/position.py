r"""Positions: attention alone can't tell in which order tokens stand; these tell it.

Every layer here takes `token_positions`, integers that broadcast against the sequence axis of its input: (seq,),
the same for all sequences, or with leading axes. Positions are counted from 0; one that isn't in the table is an
IndexError, a shape that doesn't broadcast a ValueError. They may lie on the host, whatever the device of the input:
there a look at them waits for no GPU.
"""

import math

import numpy as np
from jaxtyping import Float, Integer

from numpygpt.array import Array, at_least_float32, check_features, check_ids, check_positive
from numpygpt.config import RopeScaling
from numpygpt.init import Seed
from numpygpt.layers.embedding import Embedding
from numpygpt.module import Module


def check_positions(token_positions: Array, x: Array, max_seq_len: int) -> None:
    """Raise unless the positions are in 0..max_seq_len-1 and broadcast to the axes of x before its last."""
    check_ids(token_positions, max_seq_len, "position")
    positions, sequences = token_positions.shape, x.shape[:-1]
    fit = len(positions) <= len(sequences)
    if not fit or any(p not in (1, n) for p, n in zip(positions[::-1], sequences[::-1], strict=False)):
        raise ValueError(f"positions of shape {positions} don't broadcast to sequences of shape {sequences}")


class SinusoidalPositions(Module):
    r"""Adds a fixed vector of sines and cosines to each position.

    Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.5. $t$ is the position; an odd $D$ ends on a sine.

    $$P_{t,2i} = \sin\big(t / 10000^{2i/D}\big), \qquad P_{t,2i+1} = \cos\big(t / 10000^{2i/D}\big) \tag{1}$$
    $$y_{tc} = x_{tc} + P_{tc} \tag{2}$$

    **Backward.** $P$ is constant, and $\partial y_{tc}/\partial x_{tc} = 1$:

    $$\bar x = \bar y \tag{3}$$

    **Reading.** A constant that is added is invisible to the gradient.
    """

    def __init__(self, max_seq_len: int, d_model: int, *, dtype: np.typing.DTypeLike = np.float32):
        check_positive(max_seq_len=max_seq_len, d_model=d_model)
        frequency = 10000.0 ** (-np.arange(0, d_model, 2) / d_model)
        angle = np.arange(max_seq_len)[:, None] * frequency
        table = np.zeros((max_seq_len, d_model))
        table[:, 0::2] = np.sin(angle)
        table[:, 1::2] = np.cos(angle)[:, : d_model // 2]
        self.table = table.astype(dtype)  # (1)

    def forward(
        self, x: Float[Array, "... seq d_model"], token_positions: Integer[Array, "..."]
    ) -> Float[Array, "... seq d_model"]:
        """Return x plus the vectors of its positions."""
        check_features(x, self.table.shape[1])
        check_positions(token_positions, x, self.table.shape[0])
        return x + self.table[token_positions]  # (2)

    def backward(self, dy: Float[Array, "... seq d_model"]) -> Float[Array, "... seq d_model"]:
        """Return the gradient of x, which is dy."""
        return dy  # (3)


class LearnedPositions(Module):
    r"""Adds a learned vector to each position.

    Source: Gehring et al. (2017), arXiv:1705.03122, section 3.1; used by GPT-2. The vectors $P$ are an Embedding
    over positions $t_n$, with its start (deviation 1). Indices: $n$ runs over all positions of all sequences
    together.

    $$y_{nc} = x_{nc} + P_{t_n c} \tag{1}$$

    **Backward.** A sum hands its cotangent to both terms; Embedding's (2) then scatters it into $P$:

    $$\bar x_{nc} = \bar y_{nc}, \qquad \bar P_{tc} = \sum_{n:\, t_n = t} \bar y_{nc} \tag{2}$$

    **Reading.** The vector of a position learns from that position in every sequence.
    """

    def __init__(self, max_seq_len: int, d_model: int, *, dtype: np.typing.DTypeLike = np.float32, rng: Seed = None):
        check_positive(max_seq_len=max_seq_len, d_model=d_model)
        self.embeddings = Embedding(max_seq_len, d_model, dtype=dtype, rng=rng)

    def forward(
        self, x: Float[Array, "... seq d_model"], token_positions: Integer[Array, "..."]
    ) -> Float[Array, "... seq d_model"]:
        """Return x plus the vectors of its positions."""
        check_features(x, self.embeddings.weight.shape[1])
        check_positions(token_positions, x, self.embeddings.weight.shape[0])
        return x + self.embeddings.forward(np.broadcast_to(token_positions, x.shape[:-1]))  # (1)

    def backward(self, dy: Float[Array, "... seq d_model"]) -> Float[Array, "... seq d_model"]:
        """Add the gradient of the vectors; return that of x."""
        self.embeddings.backward(dy)  # (2)
        return dy  # (2)


class RotaryPositionalEmbedding(Module):
    r"""RoPE: turns each pair of features of a query or key by an angle proportional to its position.

    Source: Su et al. (2021), arXiv:2104.09864, eqs. 13 to 16 and 34. Pair $i = 0 \dots d_k/2 - 1$ of a head of
    width $d_k$ consists of features

    - `layout="interleaved"`: $(2i,\ 2i + 1)$, as in the paper and in Llama's original weights;
    - `layout="half"`: $(i,\ i + d_k/2)$, as in Hugging Face's checkpoints.

    The two differ by a fixed permutation of the features of q and k. A model made with one and run with the other
    gives fluent nonsense, and no error.

    **Frequencies.** Each pair turns at its own:

    $$\omega_i = \theta^{-2i/d_k} \tag{1}$$

    A model meets angles in longer texts that it was never trained on. `scaling` therefore lowers the frequencies by a
    factor $f$, "linear" all of them (Chen et al., 2023, arXiv:2306.15595, eq. 4: position $t/f$ in place of $t$):

    $$\omega'_i = \omega_i / f \tag{2}$$

    "llama3" (Llama 3.1's `apply_scaling`, which gives (4) in three cases) spares those that tell neighbours apart.
    Within the original context of $C$ tokens pair $i$ makes $n_i$ turns. Up to $l$ (`low_freq_factor`) turns its
    frequency is lowered wholly, from $h$ (`high_freq_factor`) on not at all, and between by a share that falls evenly:

    $$n_i = \frac{C\, \omega_i}{2\pi}, \qquad s_i = \min\Big(\max\Big(\frac{n_i - l}{h - l},\, 0\Big),\, 1\Big)
      \tag{3}$$
    $$\omega'_i = (1 - s_i)\, \omega_i / f + s_i\, \omega_i \tag{4}$$

    Without scaling $\omega' = \omega$.

    **Forward**, at position $t$, with a pair written $(x_1, x_2)$:

    $$\phi_{ti} = t\; \omega'_i \tag{5}$$
    $$\begin{pmatrix} y_1 \\ y_2 \end{pmatrix} = R(\phi) \begin{pmatrix} x_1 \\ x_2 \end{pmatrix}, \qquad
      R(\phi) = \begin{pmatrix} \cos\phi & -\sin\phi \\ \sin\phi & \cos\phi \end{pmatrix} \tag{6}$$

    Read as one complex number (eqs. 12 and 13 there), a pair is turned by one product, which NumPy does ten times as
    fast as four real ones of every other feature:

    $$y_1 + \mathrm i\, y_2 = e^{\mathrm i \phi}\, (x_1 + \mathrm i\, x_2) \tag{7}$$

    **Backward**, given $(\bar y_1, \bar y_2)$. (6) is linear, so its Jacobian is $R$ itself, and the gradient is
    multiplied by its transpose:

    $$\bar x_1 = \bar y_1 \frac{\partial y_1}{\partial x_1} + \bar y_2 \frac{\partial y_2}{\partial x_1}
      = \cos\phi\; \bar y_1 + \sin\phi\; \bar y_2, \qquad \bar x_2 = -\sin\phi\; \bar y_1 + \cos\phi\; \bar y_2
      \tag{8}$$

    Cosine is even and sine odd, so this is a turn by $-\phi$:

    $$\bar x = R(\phi)^\top \bar y = R(-\phi)\, \bar y \tag{9}$$

    **Reading.** The gradient is turned back by the angle by which the value was turned: backward is forward with the
    conjugate factor, and undoes it. Rotations keep lengths. And
    $\langle R(\phi) q, R(\psi) k\rangle = \langle q, R(\psi - \phi) k\rangle$: scores depend on the distance of two
    positions alone.
    """

    def __init__(
        self,
        theta: float,
        d_k: int,
        max_seq_len: int,
        layout: str = "interleaved",
        scaling: RopeScaling | None = None,
        *,
        dtype: np.typing.DTypeLike = np.float32,
    ):
        check_positive(d_k=d_k, max_seq_len=max_seq_len)
        if d_k % 2:
            raise ValueError(f"RoPE turns pairs of features, so the head width d_k must be even, not {d_k}")
        if not (theta > 0 and math.isfinite(theta)):
            raise ValueError(f"RoPE's theta must be positive and finite, not {theta!r}")
        if layout not in ("interleaved", "half"):
            raise ValueError(f'layout must be "interleaved" or "half", not {layout!r}')
        self.d_k, self.max_seq_len, self.layout = d_k, max_seq_len, layout
        frequency = float(theta) ** (-np.arange(0, d_k, 2) / d_k)  # (1)
        if scaling is not None:
            frequency = self.scaled(frequency, scaling)
        angle = np.arange(max_seq_len)[:, None] * frequency  # (5)
        self.turn = np.exp(1j * angle).astype(np.result_type(dtype, np.complex64))  # of (7)

    @staticmethod
    def scaled(frequency: Array, scaling: RopeScaling) -> Array:
        """Return the frequencies that take the place of these."""
        lowered = frequency / scaling.factor  # (2)
        if scaling.kind == "linear":
            return lowered
        turns = scaling.original_context * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0, 1)  # (3)
        return (1 - share) * lowered + share * frequency  # (4)

    def forward(
        self, x: Float[Array, "... seq d_k"], token_positions: Integer[Array, "..."]
    ) -> Float[Array, "... seq d_k"]:
        """Return x (..., seq, d_k) turned; `token_positions` broadcast against (..., seq)."""
        check_features(x, self.d_k)
        check_positions(token_positions, x, self.max_seq_len)
        turn = self.turn[token_positions]
        self.saved = turn
        return self.rotate(x, turn)  # (7), which is (6)

    def backward(self, dy: Float[Array, "... seq d_k"]) -> Float[Array, "... seq d_k"]:
        """Return the gradient of x: dy turned back."""
        turn = self.saved
        return self.rotate(dy, np.conj(turn))  # (9), from (8)

    def rotate(self, x: Array, turn: Array) -> Array:
        """Multiply every pair of x, read as a complex number, by `turn` (..., seq, d_k/2), as (7) says."""
        dtype, half = x.dtype, self.d_k // 2
        x = np.ascontiguousarray(x) if x.strides[-1] != x.itemsize else x
        if self.layout == "half":
            x = np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)
        y = (at_least_float32(x).view(turn.dtype) * turn).view(turn.real.dtype).astype(dtype, copy=False)
        return y if self.layout == "interleaved" else np.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1)
