"""Every layer, the whole model and the optimiser agree with PyTorch's autograd, in float64.

The references are a second writing of everything, from the formulas. Of the package they use the config alone.
"""

import itertools
import math
import random

import numpy as np
import pytest
from comparing import assert_close, randomise

from numpygpt import layers
from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.layers import (
    GELU,
    GLU,
    CrossEntropy,
    DecoderBlock,
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    Linear,
    LoRALinear,
    MultiHeadAttention,
    ReLU,
    RMSNorm,
    RotaryPositionalEmbedding,
    ScaledDotProductAttention,
    Sigmoid,
    SiLU,
    SinusoidalPositions,
    Softmax,
    SwiGLU,
)
from numpygpt.model import TransformerLM
from numpygpt.optim import Adam, AdamW, clip_grad_norm, cosine_schedule

torch = pytest.importorskip("torch")
F = torch.nn.functional

pytestmark = pytest.mark.usefixtures("one_torch_thread")


# The references. `w` are weights by name, as in the state dict.

ACTIVATIONS = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
}
GATES = {"glu": "sigmoid", "bilinear": "identity", "reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def under(w, name):
    """The weights of the part `name`."""
    return {key.removeprefix(name + "."): value for key, value in w.items() if key.startswith(name + ".")}


def linear(w, x):
    return F.linear(x, w["weight"], w.get("bias"))


def feed_forward(activation):
    return lambda w, x: linear(under(w, "w2"), ACTIVATIONS[activation](linear(under(w, "w1"), x)))


def gated(activation):
    def reference(w, x):
        gate = ACTIVATIONS[activation](linear(under(w, "w1"), x))
        return linear(under(w, "w2"), gate * linear(under(w, "w3"), x))

    return reference


def sinusoids(positions, d_model):
    """Sine and cosine as the parts of one complex number."""
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    turned = torch.exp(1j * positions[..., None] * torch.exp(-math.log(10000) * exponents))
    return torch.stack([turned.imag, turned.real], -1).flatten(-2)[..., :d_model]


def rotary(x, positions, theta, layout):
    """Complex multiplication for 'interleaved'; for 'half' Hugging Face's way, x cos + rotate_half(x) sin."""
    d_k = x.shape[-1]
    angle = positions[..., None] / theta ** (torch.arange(0, d_k, 2, dtype=torch.float64) / d_k)
    if layout == "interleaved":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    first, second = x.chunk(2, -1)
    angle = torch.cat([angle, angle], -1)
    return x * torch.cos(angle) + torch.cat([-second, first], -1) * torch.sin(angle)


def attention(num_heads, num_kv_heads, rope=None):
    """`rope` is (theta, layout) or None. Without positions and mask, torch's own causal attention."""

    def reference(w, x, positions=None, mask=None):
        d_k = x.shape[-1] // num_heads

        def heads(name):
            return linear(under(w, name), x).unflatten(-1, (-1, d_k)).transpose(-3, -2)

        q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
        t = torch.arange(x.shape[-2]) if positions is None else positions
        if rope is not None:
            q, k = rotary(q, t[..., None, :], *rope), rotary(k, t[..., None, :], *rope)
        k, v = (z.repeat_interleave(num_heads // num_kv_heads, -3) for z in (k, v))
        if positions is None and mask is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            visible = t[..., :, None] >= t[..., None, :]
            visible = visible if mask is None else visible & mask
            o = masked_attention(q, k, v, visible[..., None, :, :])
        return linear(under(w, "output_proj"), o.transpose(-3, -2).flatten(-2))

    return reference


def masked_attention(q, k, v, mask):
    """torch's attention; a query that sees no key gets zero."""
    mask = torch.atleast_2d(mask)
    sees = mask.any(-1, keepdim=True)
    return torch.where(sees, F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~sees), 0.0)


def norm(config, w, x):
    if config.norm == "rmsnorm":
        return F.rms_norm(x, (config.d_model,), w["weight"], config.norm_eps)
    return F.layer_norm(x, (config.d_model,), w["weight"], w.get("bias"), config.norm_eps)


def block(config, drop=lambda x: x):
    rope = (config.rope_theta, config.rope_layout) if config.positions == "rope" else None
    attend = attention(config.num_heads, config.num_kv_heads or config.num_heads, rope)
    feed = gated(GATES[config.ffn]) if config.ffn in GATES else feed_forward(config.ffn)

    def reference(w, x):
        for sublayer, layer_norm, name in (attend, "ln1", "attn"), (feed, "ln2", "ffn"):
            if config.norm_position == "pre":
                x = x + drop(sublayer(under(w, name), norm(config, under(w, layer_norm), x)))
            else:
                x = norm(config, under(w, layer_norm), x + drop(sublayer(under(w, name), x)))
        return x

    return reference


def reference_logits(config, w, ids, kept=None):
    """The whole model, for every option of its config. With dropout, `kept` are its masks, in order."""
    masks = iter(() if kept is None else kept)

    def drop(x):
        return x if kept is None else torch.where(next(masks), x / (1 - config.dropout), 0.0)

    x = w["token_embeddings.weight"][ids]
    if config.positions == "sinusoidal":
        x = x + sinusoids(torch.arange(ids.shape[-1]), config.d_model)
    if config.positions == "learned":
        x = x + w["positions.embeddings.weight"][: ids.shape[-1]]
    x = drop(x)
    for i in range(config.num_layers):
        x = block(config, drop)(under(w, f"layers.{i}"), x)
    if config.norm_position == "pre":
        x = norm(config, under(w, "ln_final"), x)
    assert next(masks, None) is None
    return x @ w["token_embeddings.weight" if config.tie_embeddings else "lm_head.weight"].T


# Comparing


def weights(module):
    return {name: torch.tensor(value, requires_grad=True) for name, value in module.state_dict().items()}


def assert_same_gradients(module, w):
    for name, p in module.named_parameters():
        assert_close(p.grad, w[name].grad, name)


def check(layer, reference, *inputs, seed=0, **kwargs):
    """Hold forward, and backward of a random cotangent, against `reference(weights, *inputs)`."""
    rng = np.random.default_rng(seed)
    randomise(layer, rng)
    y = layer.forward(*inputs, **kwargs)
    dy = rng.standard_normal(y.shape)
    dx = layer.backward(dy)

    w = weights(layer)
    tensors = [torch.tensor(x, requires_grad=x.dtype == np.float64) for x in inputs]
    expected = reference(w, *tensors, **{name: torch.tensor(x) for name, x in kwargs.items()})
    expected.backward(torch.tensor(dy))
    assert y.dtype == np.float64
    assert_close(y, expected, "forward")
    floats = [x for x in tensors if x.requires_grad]
    dx = () if dx is None else dx if isinstance(dx, tuple) else (dx,)
    assert len(dx) == len(floats)
    for i, (ours, x) in enumerate(zip(dx, floats, strict=True)):
        assert_close(ours, x.grad, f"gradient of input {i}")
    assert_same_gradients(layer, w)


def normal(*shape):
    return np.random.default_rng(math.prod(shape)).standard_normal(shape)


F64 = {"dtype": np.float64}
SHAPES = [(6,), (5, 6), (2, 1, 6), (2, 3, 4, 6)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


# Layers


def test_every_layer_and_every_activation_is_compared():
    """All are imported above, where the linter lets nothing stay that no test uses."""
    assert set(layers.__all__) <= globals().keys()
    assert ACTIVATIONS.keys() == layers.activation.ACTIVATIONS.keys()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4)], ids=str)
def test_embedding(shape):
    ids = np.random.default_rng(0).integers(0, 5, shape)
    check(Embedding(5, 3, **F64), lambda w, ids: F.embedding(ids, w["weight"]), ids)


@shapes
@pytest.mark.parametrize("bias", [False, True])
def test_lora_linear(shape, bias):
    def reference(w, x):
        beside = F.linear(F.linear(x, w["A"]), w["B"])
        return F.linear(x, w["linear.weight"], w.get("linear.bias")) + 5 / 3 * beside

    check(LoRALinear(Linear(6, 4, bias, **F64), 3, 5.0), reference, normal(*shape))


@shapes
@pytest.mark.parametrize("bias", [False, True])
def test_linear(shape, bias):
    check(Linear(6, 4, bias, **F64), linear, normal(*shape))


@shapes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_layer_norm(shape, bias, eps):
    def reference(w, x):
        return F.layer_norm(x, (6,), w["weight"], w.get("bias"), eps)

    check(LayerNorm(6, eps, bias, **F64), reference, 3 + 2 * normal(*shape))


@shapes
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_rms_norm(shape, eps):
    def reference(w, x):
        module = torch.nn.RMSNorm(6, eps, dtype=torch.float64)
        return torch.func.functional_call(module, w, x)

    check(RMSNorm(6, eps, **F64), reference, 1 + 2 * normal(*shape))


@shapes
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (ReLU, "relu"),
        (Sigmoid, "sigmoid"),
        (SiLU, "silu"),
        (GELU, "gelu"),
        (lambda: GELU(approximate="tanh"), "gelu_tanh"),
    ],
)
def test_activation(make, name, shape):
    check(make(), lambda w, x: ACTIVATIONS[name](x), 3 * normal(*shape))


@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
def test_softmax(axis):
    check(Softmax(axis), lambda w, x: F.softmax(x, axis), 3 * normal(2, 3, 5))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
def test_cross_entropy(shape, ignore_index):
    rng = np.random.default_rng(1)
    logits, targets = 3 * rng.standard_normal((*shape, 7)), rng.integers(0, 7, shape)
    if ignore_index is not None and shape:
        targets[..., ::2] = ignore_index
    layer = CrossEntropy(ignore_index)
    loss = layer.forward(logits, targets)
    x = torch.tensor(logits, requires_grad=True)
    ignored = {} if ignore_index is None else {"ignore_index": ignore_index}
    expected = F.cross_entropy(x.reshape(-1, 7), torch.tensor(targets).reshape(-1), **ignored)
    (2.5 * expected).backward()
    assert_close(loss, expected, "loss")
    assert_close(layer.backward(2.5), x.grad, "gradient")


@shapes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation, bias, shape):
    check(FeedForward(6, 9, activation, bias, **F64), feed_forward(activation), normal(*shape))


@shapes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(activation, bias, shape):
    check(GLU(6, 9, activation, bias, **F64), gated(activation), normal(*shape))


def test_swiglu_of_default_width():
    check(SwiGLU(6, **F64), gated("silu"), normal(2, 5, 6))


@shapes
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
def test_dropout(p, shape):
    kept = torch.tensor(np.random.default_rng(5).random(shape, dtype=np.float32) >= p)
    check(Dropout(p, rng=5), lambda w, x: torch.where(kept, x / (1 - p), 0.0), normal(*shape))
    check(Dropout(p, rng=5).eval(), lambda w, x: F.dropout(x, p, training=False), normal(*shape))


POSITIONS = {
    "from 0": np.arange(5),
    "offset": np.arange(3, 8),
    "with gaps": np.array([0, 1, 4, 4, 11]),
    "by sequence": np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]),
}
positions = pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)


@positions
@pytest.mark.parametrize("d_model", [1, 6, 7])
def test_sinusoidal_positions(positions, d_model):
    layer = SinusoidalPositions(12, d_model, **F64)
    check(layer, lambda w, x, t: x + sinusoids(t, d_model), normal(2, 5, d_model), positions)


@positions
def test_learned_positions(positions):
    layer = LearnedPositions(12, 6, **F64)
    check(layer, lambda w, x, t: x + w["embeddings.weight"][t], normal(2, 5, 6), positions)


@positions
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("theta", [10000.0, 50.0])
def test_rope(positions, layout, theta):
    layer = RotaryPositionalEmbedding(theta, 8, 12, layout, **F64)
    t = positions[..., None, :]  # over the heads
    check(layer, lambda w, x, t: rotary(x, t, theta, layout), normal(2, 3, 5, 8), t)


def qkv(queries, keys, *batch):
    rng = np.random.default_rng(7)
    return [rng.standard_normal((*batch, n, d)) for n, d in ((queries, 6), (keys, 6), (keys, 4))]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_attention_without_a_mask(batch):
    check(ScaledDotProductAttention(), lambda w, *qkv: F.scaled_dot_product_attention(*qkv), *qkv(4, 5, *batch))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_attention_causal(batch):
    def reference(w, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(ScaledDotProductAttention(), reference, *qkv(5, 5, *batch), mask=np.tri(5, dtype=bool))


@pytest.mark.parametrize("shape", [(4, 5), (5,), (2, 1, 4, 5), (3, 4, 1), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.2, 0.6])
def test_attention_with_a_mask_that_may_hide_every_key(shape, density):
    mask = np.random.default_rng(5).random(shape) < density
    layer = ScaledDotProductAttention()
    q, k, v = qkv(4, 5, 2, 3)
    check(layer, lambda w, q, k, v, mask: masked_attention(q, k, v, mask), q, k, v, mask=mask)
    blind = ~np.broadcast_to(mask, (2, 3, 4, 5)).any(-1)
    assert not layer.forward(q, k, v, mask)[blind].any()
    assert not layer.backward(np.ones((2, 3, 4, 4)))[0][blind].any()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", [None, "interleaved", "half"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_multi_head_attention(kv_heads, layout, bias, batch):
    rope = layout and RotaryPositionalEmbedding(100.0, 4, 12, layout, **F64)
    layer = MultiHeadAttention(16, 4, kv_heads, rope, bias, **F64)
    check(layer, attention(4, kv_heads, layout and (100.0, layout)), normal(*batch, 5, 16))


@positions
@pytest.mark.parametrize("masked", [False, True])
def test_multi_head_attention_with_positions_and_mask(positions, masked):
    layer = MultiHeadAttention(16, 4, 2, RotaryPositionalEmbedding(100.0, 4, 12, **F64), **F64)
    mask = {"mask": np.random.default_rng(2).random((2, 5, 5)) < 0.5} if masked else {}
    check(layer, attention(4, 2, (100.0, "interleaved")), normal(2, 5, 16), positions, **mask)


def small(**options):
    base = {"vocab_size": 11, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 4}
    return TransformerConfig(**base | options)


@pytest.mark.parametrize("norm", CHOICES["norm"])
@pytest.mark.parametrize("norm_position", CHOICES["norm_position"])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_decoder_block(norm, norm_position, ffn, bias):
    config = small(norm=norm, norm_position=norm_position, ffn=ffn, bias=bias, num_kv_heads=2, d_ff=20)
    check(DecoderBlock(config, **F64), block(config), normal(2, 5, 16))


# The whole model: all combinations of six options, and the others drawn at random beside them

PARTS = {name: CHOICES[name] for name in ("ffn", "positions", "norm", "norm_position")}
PARTS |= {"bias": (False, True), "tie_embeddings": (False, True)}


def all_configs():
    draw = random.Random(1)
    for choices in itertools.product(*PARTS.values()):
        yield small(
            **dict(zip(PARTS, choices, strict=True)),
            num_kv_heads=draw.choice([None, 1, 2]),
            rope_layout=draw.choice(CHOICES["rope_layout"]),
            rope_theta=draw.choice([10000.0, 20.0]),
            norm_eps=draw.choice([1e-5, 1e-2]),
            d_ff=draw.choice([None, 20]),
            num_layers=draw.choice([1, 2, 3]),
            dropout=draw.choice([0.0, 0.3]),
        )


def name_of(config):
    parts = [config.norm_position, config.norm, config.ffn, config.positions]
    return "-".join(parts + ["bias"] * config.bias + ["tied"] * config.tie_embeddings)


def assert_biases_where_they_belong(config, w):
    """The references take a bias where there is one."""
    biased = {name.removesuffix(".bias") for name in w if name.endswith(".bias")}
    kinds = (".attn.", ".ffn.", "ln") if config.norm == "layernorm" else (".attn.", ".ffn.")
    may = {name.removesuffix(".weight") for name in w if name.endswith(".weight") and any(k in name for k in kinds)}
    assert biased == (may if config.bias else set())


@pytest.mark.parametrize("config", list(all_configs()), ids=name_of)
def test_model(config, unchecked):
    rng = np.random.default_rng(3)
    model, cross_entropy = TransformerLM(config, **F64), CrossEntropy(ignore_index=-1)
    randomise(model, rng)
    ids, targets = rng.integers(0, 11, (2, 7)), rng.integers(-1, 11, (2, 7))
    logits = model.forward(ids)
    loss = cross_entropy.forward(logits, targets)
    cotangent = rng.standard_normal(logits.shape)
    model.backward(cross_entropy.backward() + cotangent)

    w = weights(model)
    assert_biases_where_they_belong(config, w)
    dropped = [m.saved for m in model.modules() if isinstance(m, Dropout)]
    kept = [torch.tensor(factor != 0) for factor in dropped] if config.dropout else None
    expected = reference_logits(config, w, torch.tensor(ids), kept)
    expected_loss = F.cross_entropy(expected.flatten(0, -2), torch.tensor(targets).flatten(), ignore_index=-1)
    (expected_loss + (expected * torch.tensor(cotangent)).sum()).backward()
    assert_close(logits, expected, "logits")
    assert_close(loss, expected_loss, "loss")
    assert_same_gradients(model, w)
    with torch.no_grad():
        expected = F.softmax(reference_logits(config, w, torch.tensor(ids))[..., -1, :], -1)
    assert_close(model.eval().next_token_probs(ids), expected, "next token")


# Optimisers


def schedule(optimiser, max_lr, min_lr, warmup, decay):
    """torch's own pieces: a linear rise, half a cosine, a constant."""
    rates = torch.optim.lr_scheduler
    pieces = [
        rates.LinearLR(optimiser, 1 / warmup, total_iters=warmup - 1),
        rates.CosineAnnealingLR(optimiser, decay - warmup, min_lr),
        rates.ConstantLR(optimiser, min_lr / max_lr, total_iters=10**6),
    ]
    return rates.SequentialLR(optimiser, pieces, [warmup, decay])


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.8, 0.95), 1e-3), ((0.0, 0.5), 1e-8)], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("ours", "theirs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
def test_training_follows_the_same_path(ours, theirs, weight_decay, betas, eps):
    """20 steps with clipping (of some steps, not all), weight decay and a schedule."""
    config = small(norm="layernorm", bias=True, num_kv_heads=2, d_ff=20, tie_embeddings=True, num_layers=1)
    rng = np.random.default_rng(4)
    model, cross_entropy = TransformerLM(config, **F64), CrossEntropy()
    randomise(model, rng)
    optimiser = ours(model.parameters(), betas=betas, eps=eps, weight_decay=weight_decay)

    w = weights(model)
    groups = [
        {"params": [p for p in w.values() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in w.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = theirs(groups, lr=0.02, betas=betas, eps=eps)
    rates = schedule(reference, 0.02, 0.002, 5, 15)

    clipped = []
    for step in range(20):
        ids = rng.integers(0, 11, (4, 8))
        model.zero_grad()
        loss = cross_entropy.forward(model.forward(ids[:, :-1]), ids[:, 1:])
        model.backward(cross_entropy.backward())
        norm = clip_grad_norm(model.parameters(), 1.8)
        optimiser.lr = cosine_schedule(step, max_lr=0.02, min_lr=0.002, warmup_steps=5, decay_steps=15)
        optimiser.step()

        reference.zero_grad()
        logits = reference_logits(config, w, torch.tensor(ids[:, :-1]))
        expected_loss = F.cross_entropy(logits.flatten(0, -2), torch.tensor(ids[:, 1:]).flatten())
        expected_loss.backward()
        expected_norm = float(torch.nn.utils.clip_grad_norm_(w.values(), math.inf))  # no clipping
        # torch divides by (norm + 1e-6), so it is given as much more.
        torch.nn.utils.clip_grad_norm_(w.values(), 1.8 * (1 + 1e-6 / expected_norm))
        assert_close(optimiser.lr, rates.get_last_lr()[0], "learning rate")
        reference.step()
        rates.step()

        assert_close(loss, expected_loss, f"loss of step {step}")
        assert_close(norm, expected_norm, f"norm of step {step}")
        assert_same_gradients(model, w)
        for name, p in model.named_parameters():
            assert_close(p.value, w[name], f"{name} after step {step}")
        clipped.append(norm > 1.8)
    assert any(clipped) and not all(clipped)
