"""The model of docs/scaling.md: its memory is what a model keeps, its ring is a ring, its tables are the page's."""

import sys
from pathlib import Path

import numpy as np
import pytest
from running import SCRIPTS, run

from numpygpt.config import TransformerConfig
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.model import TransformerLM

sys.path.insert(0, str(SCRIPTS))
from scaling.model import Network, activation_values, efficiency, parameters, ring_bytes, state_bytes

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"


def arrays(item, found):
    """Collect the memory of all arrays in an object, by its address."""
    if isinstance(item, np.ndarray):
        base = item
        while isinstance(base.base, np.ndarray):
            base = base.base
        found[base.__array_interface__["data"][0]] = base
    elif isinstance(item, tuple | list):
        for each in item:
            arrays(each, found)


def kept(model, loss):
    """Return the bytes of all that modules keep for backward."""
    found = {}
    for module in (*model.modules(), loss):
        arrays(vars(module).get("saved"), found)
    weights = {p.buffer.value.__array_interface__["data"][0] for p in model.parameters()}
    return sum(array.nbytes for address, array in found.items() if address not in weights)


@pytest.mark.parametrize("length", [48, 64, 128, 256])
def test_the_memory_of_a_token_is_what_is_kept_for_it(length):
    config = TransformerConfig(200, length, d_model=64, num_layers=3, num_heads=4, d_ff=192)
    model, loss = TransformerLM(config, rng=0), CrossEntropy()
    ids = np.random.default_rng(0).integers(0, 200, (8, length + 1))
    loss.forward(model.forward(ids[:, :-1]), ids[:, 1:])
    assert 4 * activation_values(config) * 8 * length == pytest.approx(kept(model, loss), rel=0.02)


def test_the_state_is_weights_gradients_and_moments():
    from numpygpt.optim import AdamW

    model = TransformerLM(TransformerConfig(50, 8, d_model=16, num_layers=1, num_heads=2), rng=0)
    optimizer = AdamW(model.parameters())
    vectors = [model.flat.value, model.flat.grad, *optimizer.m, *optimizer.v]
    assert parameters(model.config) == model.flat.value.size
    assert state_bytes(model.flat.value.size) == sum(vector.nbytes for vector in vectors)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_sends_what_the_formula_says(ranks):
    vectors = np.random.default_rng(0).standard_normal((ranks, 24))
    chunks, sent = vectors.reshape(ranks, ranks, -1).copy(), 0
    for phase, turns in (("add", ranks - 1), ("copy", ranks - 1)):
        for turn in range(turns):
            before = chunks.copy()
            for rank in range(ranks):  # each sends one chunk to the next
                number = (rank - turn + (phase == "copy")) % ranks
                receiver = chunks[(rank + 1) % ranks]
                receiver[number] = before[rank, number] + (receiver[number] if phase == "add" else 0)
            sent += 4 * before[0, 0].size
    np.testing.assert_allclose(chunks.reshape(ranks, -1), np.broadcast_to(vectors.sum(0), vectors.shape))
    assert sent == ring_bytes(24, ranks)


def test_times_and_efficiency():
    network = Network(latency=2.0, bandwidth=4.0)
    assert network.all_reduce(100, 1) == 0
    assert network.all_reduce(100, 2) == 2 * 2.0 + 400 / 4.0
    assert network.all_reduce(100, 5) == pytest.approx(8 * 2.0 + 640 / 4.0)
    assert efficiency(3.0, 1.0) == 0.75


def test_the_tables_of_the_page_are_those_of_the_script():
    result = run("scale.py")
    assert result.returncode == 0, result.stderr
    page = PAGE.read_text(encoding="utf-8")
    lines = [line for line in result.stdout.splitlines() if line]
    assert len(lines) == 6 + 2 * 6
    assert not [line for line in lines if line not in page]


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--sizes", "X"], "invalid choice: 'X'"), (["--repeats", "0"], "repeats must be an integer")],
)
def test_a_mistake_is_one_line(flags, message):
    result = run("scale.py", *flags)
    assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1
