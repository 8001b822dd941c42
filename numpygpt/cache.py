r"""The key/value cache: a text may come in pieces, and no token is computed twice.

Causal attention at position $t$ needs of the earlier tokens only their keys and values, and these depend on no later
token. So they are computed once, when their token comes, and kept.

**A slot is a position.** The key of position $s$ stands in slot $s$, turned by RoPE already, and so does the value. A
query at position $t$ sees the slots $s \le t$, which is the causal mask itself; it hides what stands behind as well.
Texts of different lengths therefore need no mask of their own: fill the shorter ones up at the end, with any ids, and
let each go on at its own position. What was filled up is never seen, and overwritten when its position comes.
"""

import numpy as np
from jaxtyping import Float, Integer

from numpygpt.array import Array, check_ids, check_positive
from numpygpt.config import TransformerConfig

BLOCK = 64  # slots that a cache starts with; full, it doubles, so that a token is copied about once


class LayerCache:
    """The keys and values of one attention, (..., kv head, slot, d_k); slots 0 to `length` - 1 are in use."""

    def __init__(self, shape: tuple[int, ...], max_length: int, like: Array):
        """`shape` is (..., kv head, 0, d_k); the arrays get the kind and dtype of `like`."""
        self.keys, self.values = np.zeros_like(like, shape=shape), np.zeros_like(like, shape=shape)
        self.max_length, self.length = max_length, 0

    def update(
        self,
        k: Float[Array, "... kv seq d_k"],
        v: Float[Array, "... kv seq d_k"],
        token_positions: Integer[Array, "... seq"],
    ) -> tuple[Float[Array, "... kv keys d_k"], Float[Array, "... kv keys d_k"]]:
        """Put k and v into the slots of their positions; return views of all slots up to the last of these.

        `token_positions` are (seq,) or have k's batch axes, on the host or where k is.
        """
        length = int(token_positions.max()) + 1
        self.keys, self.values = self._grown(self.keys, length), self._grown(self.values, length)
        for slots, new in ((self.keys, k), (self.values, v)):
            if token_positions.ndim == 1:
                slots[..., token_positions, :] = new
            else:
                positions = np.asarray(token_positions, like=slots)
                np.put_along_axis(slots, positions[..., None, :, None], new, axis=-2)
        self.length = length
        return self.keys[..., :length, :], self.values[..., :length, :]

    def _grown(self, slots: Array, length: int) -> Array:
        """Return an array with room for `length` positions: this one, or a larger copy."""
        *leading, size, d_k = slots.shape
        if length <= size:
            return slots
        size = min(self.max_length, max(length, 2 * size, BLOCK))
        grown = np.zeros_like(slots, shape=(*leading, size, d_k))  # zeros: 0 times what is hidden must not be NaN
        grown[..., : slots.shape[-2], :] = slots
        return grown


class KeyValueCache:
    """The caches of all layers of a model, made by `TransformerLM.new_cache`, for one batch of texts.

    `layers` has a LayerCache for each block. What they hold belongs to the weights it was computed with.
    """

    def __init__(self, config: TransformerConfig, batch_shape: tuple[int, ...], like: Array):
        """`batch_shape` are the axes of the token ids before their last; arrays are made as `like` is."""
        check_positive(**{f"batch axis {i}": size for i, size in enumerate(batch_shape)})
        self.config, self.batch_shape = config, batch_shape
        shape = (*batch_shape, config.num_kv_heads or config.num_heads, 0, config.d_model // config.num_heads)
        self.layers = [LayerCache(shape, config.context_length, like) for _ in range(config.num_layers)]

    @property
    def length(self) -> int:
        """The number of tokens cached, and so the position of the next one; of texts filled up, the longest's."""
        return self.layers[-1].length  # the last one written: a forward that was interrupted doesn't count

    def positions_of(
        self, token_ids: Integer[Array, "... seq"], token_positions: Integer[Array, "..."] | None
    ) -> Integer[Array, "... seq"]:
        """Return the positions of the next tokens: `length` and so on, or those given, once they are checked.

        Given ones are (seq,) or (..., seq), in each text one after the other, from `length` or from an earlier slot
        on, which is overwritten. ValueError for others, for ids of another batch, and for more than fit the context.
        """
        *batch_shape, seq = token_ids.shape
        if tuple(batch_shape) != self.batch_shape:
            raise ValueError(f"the cache is for batch axes {self.batch_shape}, but the ids have {tuple(batch_shape)}")
        if token_positions is None:
            stop = self.length + seq
            if stop > self.config.context_length:
                raise ValueError(
                    f"{seq} tokens after {self.length} cached ones don't fit context_length "
                    f"{self.config.context_length}"
                )
            return np.arange(self.length, stop)
        check_ids(token_positions, self.config.context_length, "position")
        if token_positions.shape not in ((seq,), token_ids.shape):
            raise ValueError(
                f"with a cache, token_positions have shape {(seq,)} or {token_ids.shape}, not {token_positions.shape}"
            )
        first = token_positions[..., :1]
        if not bool(np.all(token_positions == first + np.arange(seq, like=first))) or int(first.max()) > self.length:
            raise ValueError(
                f"with a cache, token_positions go up by one from the {self.length} tokens cached, or from an earlier "
                "slot; a gap would be seen as a token"
            )
        return token_positions

    @property
    def nbytes(self) -> int:
        """The memory of all arrays, in bytes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
