r"""Attention: every position gathers from the positions that it may see."""

import copy
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Integer

from numpygpt.array import Array, check_cotangent, check_positive
from numpygpt.cache import LayerCache
from numpygpt.einsum import einsum
from numpygpt.init import Seed
from numpygpt.layers.linear import Linear
from numpygpt.layers.position import RotaryPositionalEmbedding
from numpygpt.layers.softmax import exponentials
from numpygpt.module import Module


def check_mask(mask: Array) -> None:
    """Raise unless the mask is boolean: an additive one of 0 and -inf would be taken the other way round."""
    if getattr(mask, "dtype", None) != np.bool:
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"mask must be a boolean array, true where a query may see a key, not {kind}")


QUERIES = 64  # positions in a block of causal attention
Block = tuple[slice, slice, int, Array | None]  # queries; keys; from which key on some are hidden; which, from which


def whole(mask: Array | None) -> Iterator[Block]:
    """Yield all queries and all keys as one block."""
    yield slice(None), slice(None), 0, None if mask is None else ~mask


def causal_blocks(q: Array, k: Array, group: int) -> Iterator[Block]:
    """Yield blocks of QUERIES positions, `group` rows of q at each, with the keys that any of these rows may see."""
    for start in range(0, k.shape[-2], QUERIES):
        stop = min(start + QUERIES, k.shape[-2])
        position = np.arange(start, stop, like=q)
        hidden = position > np.repeat(position, group)[:, None]
        yield slice(start * group, stop * group), slice(stop), start, hidden


class ScaledDotProductAttention(Module):
    r"""$\mathrm{softmax}\big(q k^\top / \sqrt{d_k}\big)\, v$, hidden keys left out exactly.

    Source: Vaswani et al. (2017), arXiv:1706.03762, eq. 1. $d_k$ is the width of a head, not of the model: if the
    features of $q$ and $k$ are independent, of mean 0 and variance 1, the sum of $d_k$ products has variance $d_k$, and
    dividing by $\sqrt{d_k}$ makes it 1.
    Indices: $t$ query position, $s, s'$ key positions, $d$ feature of q and k, $e$ feature of v; all leading axes
    (batch, head) are the same in every array and left out. $\bar z$ means $\partial L/\partial z$.

    **Forward**

    $$a_{ts} = \frac{1}{\sqrt{d_k}} \sum_d q_{td}\, k_{sd} \tag{1}$$
    $$m_{ts} = a_{ts} \text{ if query } t \text{ may see key } s, \quad -\infty \text{ if not} \tag{2}$$
    $$M_t = \max_s m_{ts}, \qquad e_{ts} = e^{m_{ts} - M_t}, \qquad Z_t = \sum_s e_{ts}, \qquad
      p_{ts} = e_{ts} / Z_t \tag{3}$$
    $$o_{te} = \sum_s p_{ts}\, v_{se} = \frac{1}{Z_t} \sum_s e_{ts}\, v_{se} \tag{4}$$

    $e^{-\infty} = 0$: no legal score, however large, lets a hidden key leak (a large negative number in place of
    $-\infty$ would). A query that sees no key has $e_{ts} = 0$ for all $s$ and $o_t = 0$ (its $Z_t$ is taken as 1).
    $p$, the softmax of $m$, is never computed: to divide the $o_{te}$ of a query by $Z_t$ is less work than to divide
    its $p_{ts}$.

    **Backward**, given $\bar o$. From (4), $\partial o_{te}/\partial v_{se} = p_{ts}$ and
    $\partial o_{te}/\partial p_{ts} = v_{se}$. $v_{se}$ reaches feature $e$ of every query, and $p_{ts}$ every
    feature of query $t$; multiply by $\bar o_{te}$ and sum over what is reached. With
    $\tilde o_{te} = \bar o_{te}/Z_t$,

    $$\bar v_{se} = \sum_t p_{ts}\, \bar o_{te} = \sum_t e_{ts}\, \tilde o_{te} \tag{5}$$
    $$\bar p_{ts} = \sum_e \bar o_{te}\, v_{se} = Z_t \sum_e \tilde o_{te}\, v_{se} \tag{6}$$

    By softmax's Jacobian, row by row (Softmax, eq. 4), $\bar m_{ts}$ is $p_{ts}$ times $\bar p_{ts}$ less its average.
    The average needs no sum over keys (Dao et al., 2022, arXiv:2205.14135, appendix B.2): by (6) and (4),

    $$\sum_s p_{ts}\, \bar p_{ts} = \sum_e \bar o_{te} \sum_s p_{ts}\, v_{se} = \sum_e \bar o_{te}\, o_{te} \tag{7}$$
    $$\bar m_{ts} = p_{ts}\Big(\bar p_{ts} - \sum_{s'} p_{ts'}\, \bar p_{ts'}\Big)
      = e_{ts} \Big(\sum_e \tilde o_{te}\, v_{se} - \sum_e \tilde o_{te}\, o_{te}\Big) \tag{8}$$

    In (2) a visible score is passed on and a hidden one is replaced by a constant, so $\bar a_{ts} = \bar m_{ts}$
    where visible and 0 where not; but there $e_{ts} = 0$, so (8) is 0 already, and $\bar a = \bar m$ without a second
    masking. From (1), $\partial a_{ts}/\partial q_{td} = k_{sd}/\sqrt{d_k}$, and $q_{td}$ reaches the scores of all
    keys; $\partial a_{ts}/\partial k_{sd} = q_{td}/\sqrt{d_k}$, and $k_{sd}$ reaches those of all queries:

    $$\bar q_{td} = \frac{1}{\sqrt{d_k}} \sum_s \bar a_{ts}\, k_{sd} \tag{9}$$
    $$\bar k_{sd} = \frac{1}{\sqrt{d_k}} \sum_t \bar a_{ts}\, q_{td} \tag{10}$$

    **Reading.** A key is pulled towards the queries whose outputs it would improve, in proportion to how much they
    looked at it. With a causal mask, $\bar k_s$ and $\bar v_s$ gather from queries $t \ge s$ only: the arrow of
    forward, reversed.

    Each row $t$ of (1) to (4) and (6) to (9) stands for itself, and (5) and (10) are sums over rows. So if attention is
    causal, queries are taken in blocks, and a block meets only the keys up to its end: nearly half of the work is never
    done.
    """

    def forward(
        self,
        q: Float[Array, "... queries d_k"],
        k: Float[Array, "... keys d_k"],
        v: Float[Array, "... keys d_v"],
        mask: Bool[Array, "..."] | None = None,
        causal: int = 0,
    ) -> Float[Array, "... queries d_v"]:
        """Return the attended values. `mask` is true where a query may see a key, and broadcasts to
        (..., queries, keys). Or `causal` is the number of queries at each position, and a query sees the keys up to its
        own position.
        """
        if mask is not None:
            check_mask(mask)
        scale = q.shape[-1] ** -0.5
        q = scale * q
        parts: list[tuple] = []
        for rows, keys, start, hidden in causal_blocks(q, k, causal) if causal else whole(mask):
            scores = einsum("...td,...sd->...ts", q[..., rows, :], k[..., keys, :])  # (1)
            if hidden is not None:
                np.copyto(scores[..., start:], -np.inf, where=hidden)  # (2)
            e, z = exponentials(scores, -1, out=scores)  # (3)
            o = einsum("...ts,...se->...te", e, v[..., keys, :]) / z  # (4)
            parts.append((rows, keys, e, z, o))
        self.saved = q, k, v, scale, parts
        return parts[0][-1] if len(parts) == 1 else np.concatenate([o for *_, o in parts], axis=-2)

    def backward(
        self, do: Float[Array, "... queries d_v"]
    ) -> tuple[Float[Array, "... queries d_k"], Float[Array, "... keys d_k"], Float[Array, "... keys d_v"]]:
        """Return the gradients of q, k and v."""
        q, k, v, scale, parts = self.saved  # this q is the scaled one
        check_cotangent(do, (*q.shape[:-1], v.shape[-1]))
        dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
        for rows, keys, e, z, o in parts:
            do_z = do[..., rows, :] / z
            dv[..., keys, :] += einsum("...ts,...te->...se", e, do_z)  # (5)
            da = einsum("...te,...se->...ts", do_z, v[..., keys, :])  # (6)
            da -= einsum("...e,...e->...", do_z, o)[..., None]  # (7)
            da *= e  # (8)
            dq[..., rows, :] = scale * einsum("...ts,...sd->...td", da, k[..., keys, :])  # (9)
            dk[..., keys, :] += einsum("...ts,...td->...sd", da, q[..., rows, :])  # (10), its factor is in q
        return dq, dk, dv


class MultiHeadAttention(Module):
    r"""Causal self-attention in $H$ heads, which may share $G \le H$ key/value heads.

    Source: Vaswani et al. (2017), arXiv:1706.03762, sections 3.2.2 and 3.2.3 (the causal mask); fewer key/value
    heads: Shazeer (2019), arXiv:1911.02150 ($G = 1$), Ainslie et al. (2023), arXiv:2305.13245, section 2.2. Query
    head $h$ uses key/value head $g = \lfloor h/R \rfloor$, $R = H/G$: heads $gR \dots gR + R - 1$ form group $g$, as
    in Llama's checkpoints. Indices, all from 0: $t, s$ positions in a sequence of $T$, $g$ key/value head, $r$ query
    head inside its group, $d$ feature inside a head of width $d_k = D/H$. Batch axes are left out. Biases, if there
    are any, are Linear's.

    **Forward**

    $$q = W_q x, \qquad k = W_k x, \qquad v = W_v x \tag{1}$$

    *Split.* The $H d_k$ features of $q$ at a position are read as $(g, r, d)$, the $G d_k$ of $k$ and $v$ as $(g, d)$:

    $$q_{gtrd} = q_{t,\,(gR + r)\,d_k + d}, \qquad
      k_{gsd} = k_{s,\,g\,d_k + d}, \qquad v_{gsd} = v_{s,\,g\,d_k + d} \tag{2}$$

    *Rotate*, if there is a RoPE: $q_{gtrd}$ by the angles of position $t$, $k_{gsd}$ by those of $s$.

    $$q' = \mathrm{RoPE}(q), \qquad k' = \mathrm{RoPE}(k) \tag{3}$$

    *Mask.* A query sees no key after its own position (and, if a mask is given, only what that allows):

    $$\text{visible}_{ts} = \big[\mathrm{position}(s) \le \mathrm{position}(t)\big] \wedge \text{mask}_{ts} \tag{4}$$

    *Attend.* Nothing in attention links one query to another, so the $R$ heads of a group simply are $TR$ queries to
    its $T$ keys, $R$ at each position; (4) holds for each head:

    $$o_{g,(tr),d} = \mathrm{attention}\big(q'_{g,(tr),d},\; k'_{gsd},\; v_{gsd},\; \text{visible}_{ts}\big) \tag{5}$$

    *Merge* is (2) backwards, and the heads are mixed:

    $$o_{t,\,(gR + r)\,d_k + d} = o_{gtrd}, \qquad y = W_o\, o \tag{6}$$

    *With a cache*, $x$ holds the latest positions of a sequence: $t$ runs over these, and $s$ over all, whose $k'$ and
    $v$ were kept (`numpygpt/cache.py`). There is no backward then: those of earlier calls would get no gradient.

    **Backward**, each step undone in turn. Linear gives $\bar o = W_o^\top \bar y$. Split and merge only rename
    elements, each to one place: $\partial o_{t,\,(gR+r)d_k+d}/\partial o_{gtrd} = 1$ and all other derivatives are 0.
    So each element's gradient is that of its new name; the gradient of a merge is a split,

    $$\bar o_{gtrd} = \bar o_{t,\,(gR + r)\,d_k + d} \tag{7}$$

    Attention hands back $\bar q', \bar k', \bar v$, its equations (5) to (10). There the sums over queries run over
    $(t, r)$, and so over all heads that share a key. RoPE turns back:

    $$\bar q = \mathrm{RoPE}^{-1}(\bar q'), \qquad \bar k = \mathrm{RoPE}^{-1}(\bar k') \tag{8}$$

    The gradient of a split is a merge:

    $$\bar q_{t,\,(gR + r)\,d_k + d} = \bar q_{gtrd}, \qquad \bar k_{s,\,g\,d_k + d} = \bar k_{gsd}, \qquad
      \bar v_{s,\,g\,d_k + d} = \bar v_{gsd} \tag{9}$$

    $x$ fed all three projections, so three gradients add:

    $$\bar x = W_q^\top \bar q + W_k^\top \bar k + W_v^\top \bar v \tag{10}$$

    **Reading.** Heads don't meet before $W_o$: permuting them (with the columns of $W_o$) changes nothing.
    An output has no gradient in any later token.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        rope: RotaryPositionalEmbedding | None = None,
        bias: bool = False,
        *,
        dtype: np.typing.DTypeLike = np.float32,
        rng: Seed = None,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if d_model % num_heads:
            raise ValueError(f"num_heads {num_heads} doesn't divide d_model {d_model}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads {num_kv_heads} doesn't divide num_heads {num_heads}")
        d_k = d_model // num_heads
        if rope is not None and rope.d_k != d_k:
            raise ValueError(f"rope is for heads of width {rope.d_k}, but d_model / num_heads is {d_k}")
        self.num_kv_heads, self.group, self.d_k = num_kv_heads, num_heads // num_kv_heads, d_k
        rng = np.random.default_rng(rng)
        self.q_proj = Linear(d_model, d_model, bias, dtype=dtype, rng=rng)
        self.k_proj = Linear(d_model, num_kv_heads * d_k, bias, dtype=dtype, rng=rng)
        self.v_proj = Linear(d_model, num_kv_heads * d_k, bias, dtype=dtype, rng=rng)
        self.output_proj = Linear(d_model, d_model, bias, dtype=dtype, rng=rng)
        # q and k are two uses, and so is another attention with the same rope: each has a copy that saves for itself.
        # The tables are shared.
        self.q_rope, self.k_rope = copy.copy(rope), copy.copy(rope)
        self.attention = ScaledDotProductAttention()

    def forward(
        self,
        x: Float[Array, "... seq d_model"],
        token_positions: Integer[Array, "... seq"] | None = None,
        mask: Bool[Array, "... seq keys"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Array, "... seq d_model"]:
        """Return the attended x.

        Positions are 0..seq-1 unless given as (seq,) or with leading axes, on the host or where x is.

        `mask` (..., seq, keys) is true where a query may see a key, as far as causality allows. With a `cache`,
        positions count on from it, its keys come before those of x, and a backward is refused.
        """
        causal = self.group if token_positions is None and mask is None and cache is None else 0
        if token_positions is None:  # made on the host, where a look at them waits for no GPU
            token_positions = np.arange(x.shape[-2]) + (0 if cache is None else cache.length)
        elif token_positions.dtype.kind not in "iu" or token_positions.shape[-1:] != x.shape[-2:-1]:
            raise ValueError(
                f"token_positions must be one integer for each of the {x.shape[-2]} positions of x, "
                f"not {token_positions.dtype} of shape {token_positions.shape}"
            )
        q, k, v = self.q_proj.forward(x), self.k_proj.forward(x), self.v_proj.forward(x)  # (1)
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)  # (2)
        if self.q_rope is not None and self.k_rope is not None:
            t = token_positions[..., None, :, None]
            q, k = self.q_rope.forward(q, t), self.k_rope.forward(k, t)  # (3)
        q, k, v = self.fold(q), self.fold(k), self.fold(v)
        if causal:
            o = self.attention.forward(q, k, v, causal=causal)  # (4), (5)
        else:
            positions = np.asarray(token_positions, like=x)
            key_positions = positions
            if cache is not None:
                k, v = cache.update(k, v, token_positions)
                key_positions = np.arange(k.shape[-2], like=x)
            if cache is not None and mask is None and positions.size == 1:
                visible = None  # (4): one query, and the cache ends at its position
            else:
                visible = key_positions[..., None, :] <= positions[..., :, None]  # (4)
                if mask is not None:
                    check_mask(mask)
                    visible = visible & mask  # (4)
                visible = np.repeat(visible, self.group, axis=-2)[..., None, :, :]
            o = self.attention.forward(q, k, v, visible)  # (5)
        y = self.output_proj.forward(self.merge_heads(self.unfold(o, self.group)))  # (6)
        if cache is not None:
            del self.output_proj.saved  # earlier keys and values would get no gradient: no backward at all
        return y

    def backward(self, dy: Float[Array, "... seq d_model"]) -> Float[Array, "... seq d_model"]:
        """Add the gradients of the projections; return that of x."""
        do = self.split_heads(self.output_proj.backward(dy))  # (7)
        dq, dk, dv = self.attention.backward(self.fold(do))
        dq, dk, dv = self.unfold(dq, self.group), self.unfold(dk, 1), self.unfold(dv, 1)
        if self.q_rope is not None and self.k_rope is not None:
            dq, dk = self.q_rope.backward(dq), self.k_rope.backward(dk)  # (8)
        dq, dk, dv = self.merge_heads(dq), self.merge_heads(dk), self.merge_heads(dv)  # (9)
        return self.q_proj.backward(dq) + self.k_proj.backward(dk) + self.v_proj.backward(dv)  # (10)

    def split_heads(self, z: Float[Array, "... seq features"]) -> Float[Array, "... kv seq group d_k"]:
        """Read features as (kv head, head in its group, d_k) and bring the kv heads before the sequence (2)."""
        return z.reshape(*z.shape[:-1], self.num_kv_heads, -1, self.d_k).swapaxes(-3, -4)

    def merge_heads(self, z: Float[Array, "... kv seq group d_k"]) -> Float[Array, "... seq features"]:
        """Undo split_heads (6)."""
        z = z.swapaxes(-4, -3)
        return z.reshape(*z.shape[:-3], -1)

    def fold(self, z: Float[Array, "... kv seq group d_k"]) -> Float[Array, "... kv rows d_k"]:
        """Join the axes of sequence and group: T positions of R heads become TR rows (5)."""
        return z.reshape(*z.shape[:-3], -1, z.shape[-1])

    def unfold(self, z: Float[Array, "... kv rows d_k"], group: int) -> Float[Array, "... kv seq group d_k"]:
        """Undo fold, for so many heads in a group: R of queries, one of keys and values."""
        return z.reshape(*z.shape[:-2], -1, group, self.d_k)
