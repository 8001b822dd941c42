"""The engine runs on CuPy unchanged: on a strict stand-in for CuPy's arrays it gives NumPy's results bit for bit.

A GPU's own kernels round differently; what is shown here is that every call is one that CuPy answers, that no array
is left on the wrong side, and that nothing is computed otherwise than on the host.
"""

import copy
import itertools
import sys

import numpy as np
import pytest
from running import SCRIPTS
from strict_array import COUNTS, StrictArray, to_device, to_host

sys.path.insert(0, str(SCRIPTS))
from device_check import cases
from device_check.cases import BAD_IDS, BASE, CONFIGS, LAYERS, REFUSED, refusals, rope
from device_check.compare import forward_and_backward, stay
from numpygpt.layers import CrossEntropy, Linear, MultiHeadAttention, SinusoidalPositions
from numpygpt.model import TransformerConfig, TransformerLM
from numpygpt.module import Module
from numpygpt.optim import Adam, AdamW, clip_grad_norm
from numpygpt.sample import generate_batch
from numpygpt.train import TrainConfig, Trainer


def same(device, host):
    """Whether a device array and a host array (or two numbers) are equal bit for bit."""
    if not isinstance(host, np.ndarray):
        return type(device) is type(host) and device == host
    assert type(device) is StrictArray
    device = to_host(device)
    return device.dtype == host.dtype and device.shape == host.shape and device.tobytes() == host.tobytes()


def arrays(x):
    """All arrays within an object: attributes, lists, dicts, saved tuples, parameters, buffers."""
    found, seen, queue = [], set(), [x]
    while queue:
        x = queue.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray | StrictArray):
            found.append(x)
        elif isinstance(x, list | tuple):
            queue.extend(x)
        elif isinstance(x, dict):
            queue.extend(x.values())
        elif type(x).__module__.startswith("numpygpt."):
            queue.extend(vars(x).values())
    return found


def all_on(kind, *objects):
    return all(type(x) is kind for x in arrays(objects))


# Each layer alone


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, *inputs = LAYERS[name]
    host = forward_and_backward(make(), inputs, stay)
    layer = make().to(to_device)
    device = forward_and_backward(layer, inputs, to_device)
    for a, b in zip(itertools.chain(*device), itertools.chain(*host), strict=True):
        assert same(a, b)
    assert all_on(StrictArray, layer)


def test_every_layer_is_covered():
    made = {type(make().to(stay)) for make, *_ in LAYERS.values()}
    import numpygpt.layers as layers

    assert {item for item in vars(layers).values() if isinstance(item, type) and issubclass(item, Module)} == made


def test_tables_move_too():
    layer = MultiHeadAttention(8, 2, rope=rope()).to(to_device)
    assert all(type(x) is StrictArray for r in (layer.q_rope, layer.k_rope) for x in (r.turn,))
    assert type(SinusoidalPositions(12, 8).to(to_device).table) is StrictArray


# Whole models

configs = pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)


def make_model(move=stay, dtype=np.float32, **options):
    return cases.make_model(dtype, **options).to(move)


def batch(move, seed=2):
    rng = np.random.default_rng(seed)
    return move(rng.integers(0, 13, (3, 8))), move(rng.integers(-1, 13, (3, 8)))


def train(model, optimiser, move, steps=3):
    """Train in place; return all losses, norms, gradients and values."""
    cross_entropy = CrossEntropy(ignore_index=-1)
    record = []
    for step in range(steps):
        ids, targets = batch(move, step)
        model.zero_grad()
        record.append(cross_entropy.forward(model.forward(ids), targets))
        model.backward(cross_entropy.backward())
        record.extend(p.grad.copy() for p in model.parameters())
        record.append(clip_grad_norm(model.parameters(), 0.3))
        optimiser.step()
        record.extend(p.value.copy() for p in model.parameters())
    assert type(record[0]) is float
    assert all_on(type(ids), cross_entropy)
    return record


@configs
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_training(options, kind, dtype):
    records, models, optimisers = {}, {}, {}
    for move in (stay, to_device):
        models[move] = make_model(move, dtype, **options)
        optimisers[move] = kind(models[move].parameters(), lr=0.01, weight_decay=0.1)
        records[move] = train(models[move], optimisers[move], move)
    for device, host in zip(records[to_device], records[stay], strict=True):
        assert same(device, host)
    for moments in ("m", "v"):
        for device, host in zip(*(getattr(optimisers[move], moments) for move in (to_device, stay)), strict=True):
            assert same(device, host)
    assert all_on(StrictArray, models[to_device], optimisers[to_device])  # values, gradients, tables, saved
    assert all_on(np.ndarray, models[stay], optimisers[stay])

    ids = batch(stay)[0]
    host = models[stay].eval().next_token_probs(ids)
    assert same(models[to_device].eval().next_token_probs(to_device(ids)), host)
    for back in (models[to_device].to("cpu"), copy.deepcopy(models[to_device]).to(stay)):
        assert all_on(np.ndarray, back)
        assert back.next_token_probs(ids).tobytes() == host.tobytes()


@configs
def test_a_cached_forward(options):
    ids = batch(stay)[0]
    each_at = np.array([[4, 5], [2, 3], [5, 6]])
    logits, caches = {}, {}
    for move in (stay, to_device):
        model, text = make_model(move, **options).eval(), move(ids)
        cache = caches[move] = model.new_cache(3)
        pieces = [model.forward(text[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 8))]
        logits[move] = [*pieces, model.forward(text[:, :2], move(each_at), cache)]
        assert all_on(type(text), cache, logits[move])
    assert caches[to_device].length == 7
    for device, host in zip(
        arrays([logits[to_device], caches[to_device]]), arrays([logits[stay], caches[stay]]), strict=True
    ):
        assert same(device, host)


def test_sampling():
    prompts = [np.array([1, 2, 3]), np.array([4]), np.arange(12)]
    steps = {move: list(generate_batch(make_model(move), prompts, 12, rng=0)) for move in (stay, to_device)}
    for device, host in zip(arrays(steps[to_device]), arrays(steps[stay]), strict=True):
        assert device.tobytes() == host.tobytes()  # all probabilities, on the host
    tokens = {move: [[draw.token for draw in step] for step in steps[move]] for move in steps}
    assert tokens[to_device] == tokens[stay]


def test_there_and_back_changes_nothing():
    model = make_model()
    before = model.state_dict()
    after = model.to(to_device).to(to_host).state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_a_copy_of_a_model_on_the_device_trains_apart():
    model = make_model(to_device)
    twin = copy.deepcopy(model)
    before = model.state_dict()
    train(twin, AdamW(twin.parameters(), lr=0.1), to_device)
    assert all(same(value, to_host(before[name])) for name, value in model.state_dict().items())
    assert not same(twin.flat.value, to_host(model.flat.value))


# What the optimiser meets on the device


def test_an_optimiser_made_before_the_move_is_refused_until_the_model_is_back():
    model = make_model()
    optimiser = AdamW(model.parameters(), lr=0.1)
    train(model, optimiser, stay)
    model.to(to_device)
    moments = [x.copy() for x in optimiser.m + optimiser.v]
    before, t = to_host(model.flat.value), optimiser.t
    model.flat.grad[...] = 1
    with pytest.raises(TypeError, match="optimiser"):
        optimiser.step()
    assert same(model.flat.value, before)
    assert optimiser.t == t
    assert all(np.array_equal(x, y) for x, y in zip(moments, optimiser.m + optimiser.v, strict=True))

    model.to(to_host)
    optimiser.step()
    assert optimiser.t == t + 1
    assert not np.array_equal(model.flat.value, before)


def test_an_optimiser_made_on_the_device_is_refused_on_the_host():
    model = make_model(to_device)
    optimiser = Adam(model.parameters())
    model.to(to_host)
    with pytest.raises(TypeError, match="optimiser"):
        optimiser.step()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_refused(bad):
    model = make_model(to_device)
    optimiser = AdamW(model.parameters())
    before = to_host(model.flat.value)
    model.layers[1].ffn.w2.weight.grad[0, 0] = bad
    for call in (optimiser.step, lambda: clip_grad_norm(model.parameters(), 1.0)):
        with pytest.raises(FloatingPointError, match=r"layers\.1\.ffn\.w2\.weight"):
            call()
    assert same(model.flat.value, before)
    assert optimiser.t == 0


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e25])
def test_clipping(size):
    gradients = {}
    for move in (stay, to_device):
        model = make_model(move)
        model.flat.grad = move(size * np.random.default_rng(0).standard_normal(model.flat.value.size, np.float32))
        norm = clip_grad_norm(model.parameters(), 1e-31 if size < 1 else 1.0)
        assert type(norm) is float
        gradients[move] = norm, model.flat.grad
    assert gradients[to_device][0] == gradients[stay][0]
    assert same(gradients[to_device][1], gradients[stay][1])


# Ids: CuPy wraps those out of range in silence


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("move", [stay, to_device])
def test_ids_out_of_range_are_refused(bad, move):
    calls = refusals(bad, move)
    assert set(calls) == set(REFUSED)
    for what, each in calls.items():
        for call in each:
            with pytest.raises(IndexError, match=f"{what} {bad} is outside"):
                call()


def test_ids_left_on_the_host_are_refused():
    model = make_model(to_device)
    with pytest.raises(TypeError, match=r"ndarray.*the model is on another device"):
        model.forward(batch(stay)[0])


@pytest.mark.parametrize("ignore_index", [None, -1, 3])
@pytest.mark.parametrize("bad", [-1, 13, 2**40])
@pytest.mark.parametrize("move", [stay, to_device])
def test_a_wrong_target_makes_the_mean_nan_and_its_number_an_error(move, bad, ignore_index):
    loss, logits = CrossEntropy(ignore_index), move(np.zeros((2, 4, 13), np.float32))
    targets = np.zeros((2, 4), np.int64)
    targets[1, 2], targets[0, 0] = bad, 3
    targets = move(targets)
    mean = loss.mean(logits, targets)
    if bad == ignore_index:
        assert loss.number(mean, targets, 13) == pytest.approx(np.log(13))
    else:
        assert np.isnan(mean.item())
        with pytest.raises(IndexError, match=f"target {bad} is outside"):
            loss.number(mean, targets, 13)


def test_a_batch_with_a_wrong_id_or_target_is_refused_and_the_next_step_is_as_if_it_had_not_been():
    weights = {}
    for wrong in (None, 0, 1):
        model = make_model(to_device, dropout=0.0)
        trainer = Trainer(model, *[np.arange(100) % 13] * 2, TrainConfig(steps=2))
        batch = [np.arange(16).reshape(2, 8) % 13 for _ in range(2)]
        if wrong is not None:
            bad = [x.copy() for x in batch]
            bad[wrong][1, 2] = 13
            with pytest.raises(IndexError, match=f"{('token id', 'target')[wrong]} 13 is outside"):
                trainer.update(*bad)
        trainer.update(*batch)
        weights[wrong] = to_host(model.flat.value).tobytes()
    assert weights[0] == weights[1] == weights[None]


# How often the host waits for the device: at each look at a number


def looks(function):
    """What a call looks at on the device, and how often; and how many pieces of work it gives to it."""
    COUNTS.clear()
    function()
    counted = dict(COUNTS)
    return counted.pop("", 0), {name: n for name, n in counted.items() if n}


@pytest.mark.parametrize("options", [{}, {"positions": "sinusoidal"}, {"num_kv_heads": 1, "ffn": "geglu"}])
def test_a_training_step_looks_at_the_device_a_few_times_however_deep_the_model(options):
    work = []
    for layers in (1, 2, 3):
        model = make_model(to_device, num_layers=layers, **options)
        # Nothing is clipped, which would be two more pieces of work.
        trainer = Trainer(model, *[np.arange(100) % 13] * 2, TrainConfig(steps=2, batch_size=2, grad_clip=1e9))
        pieces, seen = looks(trainer.train_step)
        # ids; which tokens there were, and bincount's two; the loss; the norms of matrices and of gains
        assert seen == {"int": 1, "unique": 1, "bincount": 2, "item": 1, "float": 2}
        work.append(pieces)
    assert work[2] - work[1] == work[1] - work[0] < 200  # as much for each layer


def test_the_backward_is_under_way_before_the_loss_is_looked_at(monkeypatch):
    model = make_model(to_device)
    order = []
    backward, item = model.backward, StrictArray.item
    monkeypatch.setattr(model, "backward", lambda *args: order.append("backward") or backward(*args))
    monkeypatch.setattr(StrictArray, "item", lambda x: order.append("look") or item(x))
    Trainer(model, *[np.arange(100) % 13] * 2, TrainConfig(steps=2, batch_size=2)).train_step()
    assert order == ["backward", "look"]


def test_an_optimiser_s_step_is_as_much_work_for_a_large_model_as_for_a_small_one(monkeypatch):
    monkeypatch.setattr("numpygpt.optim.PIECE", 16)
    work = set()
    for width in (8, 16):
        model = make_model(to_device, d_model=width)
        model.flat.grad[...] = 1
        work.add(looks(AdamW(model.parameters()).step)[0])
    assert len(work) == 1


def test_a_token_takes_two_looks_however_deep_the_model():
    for options in ({"num_layers": 3}, {"positions": "learned"}, {"positions": "sinusoidal"}):
        steps = generate_batch(make_model(to_device, **options), [np.array([1, 2]), np.array([3])], 3, rng=0)
        next(steps)
        assert looks(lambda steps=steps: next(steps))[1] == {"int": 1, "get": 1}  # ids, logits


# State dicts


def test_state_dict_is_a_copy_on_the_device():
    model = make_model(to_device)
    state = model.state_dict()
    assert all(type(value) is StrictArray for value in state.values())
    before = to_host(model.flat.value)
    for value in state.values():
        value[...] = 0
    assert same(model.flat.value, before)


@pytest.mark.parametrize("tied", [False, True])
def test_load_state_dict_on_the_device(tied):
    source = TransformerLM(TransformerConfig(**BASE, tie_embeddings=tied), rng=5).to(to_device)
    state = source.state_dict()
    if tied:
        state["lm_head.weight"] = state["token_embeddings.weight"].copy()
    model = make_model(to_device, tie_embeddings=tied)
    model.load_state_dict(state)
    assert same(model.flat.value, to_host(source.flat.value))
    assert all_on(StrictArray, model)
    if tied:
        state["lm_head.weight"][0, 0] += 1
        with pytest.raises(ValueError, match="tied"):
            model.load_state_dict(state)


@pytest.mark.parametrize(("here", "there"), [(to_device, stay), (stay, to_device)])
def test_a_state_from_the_other_side_is_refused_and_changes_nothing(here, there):
    model, state = make_model(here), make_model(there, num_kv_heads=4, dropout=0.0).state_dict()
    for value in state.values():
        value[...] = 0
    before = model.flat.value.copy()
    with pytest.raises((TypeError, ValueError)):
        model.load_state_dict(state)
    assert bool(np.array_equal(model.flat.value, before))


def test_on_a_device_a_gradient_is_one_block(monkeypatch):
    monkeypatch.setattr("numpygpt.module.BLOCK", 4)
    layer = Linear(4, 5)
    assert layer.weight.blocks() == [slice(row, row + 1) for row in range(5)]
    assert layer.to(to_device).weight.blocks() == [slice(0, 5)]
