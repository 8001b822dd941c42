"""The model as one writes it in PyTorch: eager, or compiled by torch.compile.

Queries, keys and values are one product, as in nanoGPT, and attention is PyTorch's own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.sizes import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Size, Weights, batches
from numpygpt.array import Array
from numpygpt.config import TransformerConfig


def norm(config: TransformerConfig) -> nn.Module:
    """Return RMSNorm or LayerNorm."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def rotary_tables(config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions and pairs, or nothing."""
    d_k = config.d_model // config.num_heads
    pairs = torch.arange(0, d_k, 2, dtype=torch.float64, device="cpu")
    positions = torch.arange(config.context_length, dtype=torch.float64, device="cpu")
    angle = positions[:, None] * config.rope_theta ** (-pairs / d_k)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring features."""
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv_proj = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.output_proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.rotates = config.positions == "rope"
        if self.rotates:
            for name, angles in zip(("cos", "sin"), rotary_tables(config), strict=True):
                self.register_buffer(name, angles, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended x."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotates:
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(o.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU, or two linear maps around a GELU."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.gelu = nn.GELU(approximate="tanh" if config.ffn == "gelu_tanh" else "none")
        self.w1 = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.w2 = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.w3 = nn.Linear(config.d_model, config.d_ff, bias=config.bias) if config.ffn == "swiglu" else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to x."""
        if self.w3 is None:
            return self.w2(self.gelu(self.w1(x)))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention, then feed-forward, each with its norm before it."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.ln1, self.attn = norm(config), Attention(config)
        self.ln2, self.ffn = norm(config), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class Model(nn.Module):
    """The language model, from ids to the loss."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context_length, config.d_model) if learned else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_final = norm(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.token_embeddings(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for block in self.layers:
            x = block(x)
        logits = self.lm_head(self.ln_final(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_their_names(weights: Weights) -> dict[str, Tensor]:
    """Return our weights as Model names them."""
    theirs = {name.replace("positions.embeddings", "positions"): torch.tensor(w) for name, w in weights.items()}
    for name in [name for name in theirs if ".q_proj." in name]:
        qkv = [theirs.pop(name.replace("q_proj", f"{z}_proj")) for z in "qkv"]
        theirs[name.replace("q_proj", "qkv_proj")] = torch.cat(qkv)
    theirs.setdefault("lm_head.weight", theirs["token_embeddings.weight"])
    return theirs


def make_model(config: TransformerConfig, weights: Weights) -> Model:
    """Return the model with these weights."""
    with torch.device("meta"):  # no weights are drawn
        model = Model(config)
    model.load_state_dict(by_their_names(weights), assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.token_embeddings.weight
    return model


def make_optimizer(model: Model) -> torch.optim.Optimizer:
    """Return AdamW, which decays matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Array, targets: Array) -> float:
    """Make a step; return its loss, for which a GPU waits until all is done."""
    device = next(model.parameters()).device
    loss = model(torch.from_numpy(ids).to(device), torch.from_numpy(targets).to(device))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item()


def make_step(
    size: Size, weights: Weights, threads: int, device: str = "cpu", *, compiled: bool = False
) -> Callable[[], float]:
    """Return a function that makes one step and returns its loss."""
    torch.set_num_threads(threads)
    model, data = make_model(size.config, weights).to(device), batches(size)
    optimizer = make_optimizer(model)
    updated = torch.compile(model) if compiled else model
    return lambda: update(updated, optimizer, *next(data))


def make_compiled_step(size: Size, weights: Weights, threads: int, device: str = "cpu") -> Callable[[], float]:
    """Return the same of the compiled model."""
    return make_step(size, weights, threads, device, compiled=True)
