r"""The Transformer language model: from token ids to the logits of what comes next."""

import math
from typing import Self

import numpy as np
from jaxtyping import Float, Integer

from numpygpt.array import Array, check_integers
from numpygpt.cache import KeyValueCache
from numpygpt.config import TransformerConfig
from numpygpt.init import Blank, Seed
from numpygpt.layers.block import DecoderBlock, make_norm, make_rope
from numpygpt.layers.dropout import Dropout
from numpygpt.layers.embedding import Embedding
from numpygpt.layers.linear import Linear
from numpygpt.layers.position import LearnedPositions, SinusoidalPositions
from numpygpt.layers.softmax import Softmax
from numpygpt.module import FlatBuffer, Module

__all__ = ["TransformerConfig", "TransformerLM"]


class TransformerLM(Module):
    r"""Embedding, $L$ decoder blocks, final norm, projection to the vocabulary.

    Source: Vaswani et al. (2017), arXiv:1706.03762, decoder only, as in Radford et al. (2019); the default parts are
    those of Llama (Touvron et al., 2023, arXiv:2302.13971, section 2.2). Tied embeddings: Press & Wolf (2017),
    arXiv:1608.05859. The start "gpt2": Radford et al. (2018), *Improving language understanding by generative
    pre-training*, section 4.1 (0.02), and Radford et al. (2019), *Language models are unsupervised multitask
    learners*, section 2.3 (the residual's factor). **Departure:** learned positions start with 0.02 as well; GPT-2's
    code has 0.01. Indices: $n$ runs over all positions of all sequences, $v$ over the vocabulary, $c$ over features.

    **Forward**

    $$x^{(0)} = \mathrm{dropout}\big(E[\text{ids}]\ (+\ \text{positions})\big) \tag{1}$$
    $$x^{(l)} = \mathrm{block}_l\big(x^{(l-1)}\big), \qquad l = 1 \dots L \tag{2}$$
    $$h = \mathrm{norm}\big(x^{(L)}\big) \ \text{(post-norm: } h = x^{(L)}) \tag{3}$$
    $$z_{nv} = \sum_c U_{vc}\, h_{nc} \tag{4}$$

    **Backward** is the same list from its end. Each layer derives its own step; ids have no gradient.

    **Tying** makes $U$ and $E$ one array $W$. Write the loss as $L(E, U)$ with both set to $W$; by the chain rule
    for two arguments, $\partial E_{vc}/\partial W_{vc} = \partial U_{vc}/\partial W_{vc} = 1$ and

    $$\bar W_{vc} = \bar U_{vc} + \bar E_{vc} \tag{5}$$

    No code computes (5): both layers hold the same Parameter, and every backward *adds* to `.grad`.

    **Reading.** A tied vector learns from every position, where it is a candidate ($\bar U$), and besides from
    those where its token stood ($\bar E$).

    All parameters are views into one flat buffer, `flat`: matrices first, then gains and biases.
    """

    def __init__(self, config: TransformerConfig, *, dtype: np.typing.DTypeLike = np.float32, rng: Seed = None):
        self.config = config
        rng = np.random.default_rng(rng)
        vocab_size, d_model, length = config.vocab_size, config.d_model, config.context_length
        rope = make_rope(config, dtype) if config.positions == "rope" else None
        self.token_embeddings = Embedding(vocab_size, d_model, dtype=dtype, rng=rng)
        self.positions: SinusoidalPositions | LearnedPositions | None = None
        if config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(length, d_model, dtype=dtype)
        elif config.positions == "learned":
            self.positions = LearnedPositions(length, d_model, dtype=dtype, rng=rng)
        self.dropout = Dropout(config.dropout, rng.spawn(1)[0])
        self.layers = [DecoderBlock(config, rope=rope, dtype=dtype, rng=rng) for _ in range(config.num_layers)]
        self.ln_final = make_norm(config, dtype) if config.norm_position == "pre" else None
        self.lm_head = Linear(d_model, vocab_size, dtype=dtype, rng=rng)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embeddings.weight
        if config.init == "gpt2" and not isinstance(rng, Blank):
            self._start_like_gpt2(rng)
        for name, p in self.named_parameters():
            p.name = name
        self.flat = FlatBuffer(sorted(self.parameters(), key=lambda p: not p.decays))

    @classmethod
    def blank(cls, config: TransformerConfig, *, dtype: np.typing.DTypeLike = np.float32) -> Self:
        """Return a model whose weights are about to be read: no start is drawn, and only one copy of them is made."""
        return cls(config, dtype=dtype, rng=Blank(np.random.PCG64(0)))

    def _start_like_gpt2(self, rng: np.random.Generator) -> None:
        """Draw every matrix with deviation 0.02, those that write into the residual with 0.02 / sqrt(2 L)."""
        for name, p in self.named_parameters():
            if p.decays:
                into_residual = name.endswith(("attn.output_proj.weight", "ffn.w2.weight"))
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_residual else 0.02
                p.value = (std * rng.standard_normal(p.shape)).astype(p.value.dtype)

    def forward(
        self,
        token_ids: Integer[Array, "... seq"],
        token_positions: Integer[Array, "... seq"] | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Array, "... seq vocab"]:
        """Return the logits (..., seq, V) for integer ids (..., seq), seq at most the context length.

        Logits at a position are for the token after it. Positions are 0..seq-1 unless given.

        With a `cache` (see new_cache) the ids go on from those that it holds, and their keys and values are added to
        it. The logits are those that one pass over the whole text has at the new ids (in evaluation; dropout draws
        anew). ValueError, and nothing is changed, if the ids don't fit the context or the cache is for another batch or
        model. A backward after such a forward is refused.
        """
        check_integers(token_ids, "token id")
        if token_ids.size == 0 or token_ids.ndim == 0:
            raise ValueError(f"token_ids must be sequences of at least one id, but their shape is {token_ids.shape}")
        if isinstance(token_ids, np.ndarray) != isinstance(self.flat.value, np.ndarray):
            raise TypeError(f"token_ids are a {type(token_ids)}, and the model is on another device: move them there")
        seq = token_ids.shape[-1]
        if seq > self.config.context_length:
            raise ValueError(f"a sequence of {seq} tokens doesn't fit context_length {self.config.context_length}")
        if cache is not None:
            if cache.config != self.config:
                raise ValueError("the cache is of a model of another config: make one with this model's new_cache")
            token_positions = cache.positions_of(token_ids, token_positions)
        x = self.token_embeddings.forward(token_ids)  # (1)
        if self.positions is not None:
            t = np.arange(seq) if token_positions is None else token_positions
            x = self.positions.forward(x, t)  # (1)
        x = self.dropout.forward(x)  # (1)
        for i, block in enumerate(self.layers):
            x = block.forward(x, token_positions, cache=cache.layers[i] if cache is not None else None)  # (2)
        if self.ln_final is not None:
            x = self.ln_final.forward(x)  # (3)
        logits = self.lm_head.forward(x)  # (4)
        if cache is not None:
            del self.lm_head.saved  # so that backward is refused before it adds anything
        return logits

    def backward(self, dlogits: Float[Array, "... seq vocab"]) -> None:
        """Add the gradients of all parameters, given that of the logits."""
        dx = self.lm_head.backward(dlogits)  # (4), (5)
        if self.ln_final is not None:
            dx = self.ln_final.backward(dx)  # (3)
        for block in reversed(self.layers):
            dx = block.backward(dx)  # (2)
        dx = self.dropout.backward(dx)  # (1)
        if self.positions is not None:
            dx = self.positions.backward(dx)  # (1)
        self.token_embeddings.backward(dx)  # (1), (5)

    def new_cache(self, batch_size: int | tuple[int, ...] = ()) -> KeyValueCache:
        """Return an empty cache for `forward` with ids (batch_size, seq); of the model's dtype and device.

        A tuple stands for several batch axes, () for none.
        """
        batch_shape = batch_size if isinstance(batch_size, tuple) else (batch_size,)
        return KeyValueCache(self.config, batch_shape, self.flat.value)

    def next_token_probs(self, token_ids: Integer[Array, "... seq"]) -> Float[Array, "... vocab"]:
        """Return the probabilities of the token after the last one: softmax of the last position's logits.

        It runs forward: in training mode with dropout, and a backward would belong to it.
        """
        return Softmax().forward(self.forward(token_ids)[..., -1, :])
