"""The model as one writes it in JAX: one function of the weights, and one compiled step."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sizes import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Size, Weights, batches
from numpygpt.config import TransformerConfig

Tree = dict[str, Any]


def linear(w: Tree, name: str, x: jax.Array) -> jax.Array:
    """Return W x, and the bias added if there is one."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def norm(config: TransformerConfig, w: Tree, name: str, x: jax.Array) -> jax.Array:
    """RMSNorm or LayerNorm."""
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    y = w[f"{name}.weight"] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rotate(config: TransformerConfig, x: jax.Array) -> jax.Array:
    """Turn neighbouring features of (batch, seq, head, d_k) by their position's angles, known when compiled."""
    seq, d_k = x.shape[1], x.shape[-1]
    angle = np.arange(seq)[:, None] * config.rope_theta ** (-np.arange(0, d_k, 2) / d_k)
    cos, sin = np.cos(angle, dtype=np.float32)[:, None], np.sin(angle, dtype=np.float32)[:, None]
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return jnp.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).reshape(x.shape)


def attention(config: TransformerConfig, w: Tree, name: str, x: jax.Array) -> jax.Array:
    """Causal self-attention."""
    q, k, v = (linear(w, f"{name}.{z}_proj", x).reshape(*x.shape[:2], config.num_heads, -1) for z in "qkv")
    if config.positions == "rope":
        q, k = rotate(config, q), rotate(config, k)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    visible = np.tri(x.shape[1], dtype=bool)
    p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return linear(w, f"{name}.output_proj", jnp.einsum("bhts,bshd->bthd", p, v).reshape(x.shape))


def feed_forward(config: TransformerConfig, w: Tree, name: str, x: jax.Array) -> jax.Array:
    """SwiGLU, or two linear maps around a GELU."""
    u = linear(w, f"{name}.w1", x)
    if config.ffn == "swiglu":
        return linear(w, f"{name}.w2", jax.nn.silu(u) * linear(w, f"{name}.w3", x))
    return linear(w, f"{name}.w2", jax.nn.gelu(u, approximate=True))


def loss_of(config: TransformerConfig, w: Tree, ids: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss."""
    x = w["token_embeddings.weight"][ids]
    if config.positions == "learned":
        x = x + w["positions.embeddings.weight"][: ids.shape[1]]
    for i in range(config.num_layers):
        x = x + attention(config, w, f"layers.{i}.attn", norm(config, w, f"layers.{i}.ln1", x))
        x = x + feed_forward(config, w, f"layers.{i}.ffn", norm(config, w, f"layers.{i}.ln2", x))
    head = w["token_embeddings.weight" if config.tie_embeddings else "lm_head.weight"]
    logits = norm(config, w, "ln_final", x) @ head.T
    of_targets = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - of_targets).mean()


def adamw(t: jax.Array, p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Return one parameter and its moments after step t."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    direction = m / (1 - BETAS[0] ** t) / (jnp.sqrt(v / (1 - BETAS[1] ** t)) + EPS)
    decay = WEIGHT_DECAY if p.ndim >= 2 else 0.0
    return p - LR * (direction + decay * p), m, v


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(config: TransformerConfig, state: Tree, ids: jax.Array, targets: jax.Array) -> tuple[Tree, jax.Array]:
    """Make one step: of the state (weights, moments, steps) the next one, and the loss."""
    loss, grads = jax.value_and_grad(functools.partial(loss_of, config))(state["w"], ids, targets)
    length = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads.values()))
    scale = jnp.minimum(1.0, CLIP / length)
    t = state["t"] + 1
    new = {name: adamw(t, p, scale * grads[name], *state["moments"][name]) for name, p in state["w"].items()}
    moments = {name: (m, v) for name, (_, m, v) in new.items()}
    return {"w": {name: p for name, (p, _, _) in new.items()}, "moments": moments, "t": t}, loss


def make_step(size: Size, weights: Weights, threads: int) -> Callable[[], float]:
    """Return a function that makes one step and returns its loss. JAX has a thread for each core of the child."""
    w = {name: jnp.array(array) for name, array in weights.items()}
    moments = {name: (jnp.zeros_like(p), jnp.zeros_like(p)) for name, p in w.items()}
    state: Tree = {"w": w, "moments": moments, "t": jnp.float32(0)}
    data = batches(size)

    def step() -> float:
        nonlocal state
        state, loss = jax.block_until_ready(update(size.config, state, *next(data)))
        return float(loss)

    return step
