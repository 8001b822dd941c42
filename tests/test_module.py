"""Parameters as views of a flat buffer, and the tree of modules that finds them."""

import copy
import pickle

import numpy as np
import pytest

from numpygpt.array import check_positive
from numpygpt.layers import Dropout, LayerNorm, Linear, RotaryPositionalEmbedding
from numpygpt.module import FlatBuffer, Module, Parameter, spans


class Net(Module):
    """Two linear layers in a list, a norm, and a tie if asked for."""

    def __init__(self, tied=False):
        self.norm = LayerNorm(3)
        self.linears = [Linear(3, 3, rng=0), Linear(3, 3, rng=1)]
        self.not_a_module = ["text", 1]
        if tied:
            self.linears[1].weight = self.linears[0].weight


NAMES = ["norm.weight", "norm.bias", "linears.0.weight", "linears.1.weight"]


def test_names_follow_the_tree_and_a_tied_parameter_comes_once():
    assert [name for name, _ in Net().named_parameters()] == list(Net().state_dict()) == NAMES
    assert [name for name, _ in Net(tied=True).named_parameters("net.")] == [f"net.{name}" for name in NAMES[:3]]
    assert len(Net(tied=True).parameters()) == 3


def test_a_state_goes_out_as_a_copy_and_comes_back():
    net, other = Net(), Net()
    for p in net.parameters():
        p.value += 1
    state = net.state_dict()
    other.load_state_dict(state)
    net.parameters()[0].value += 1
    assert all(np.array_equal(other.state_dict()[name], state[name]) for name in NAMES)
    assert not np.array_equal(net.state_dict()[NAMES[0]], state[NAMES[0]])
    state[NAMES[0]] += 1
    assert not np.array_equal(other.state_dict()[NAMES[0]], state[NAMES[0]])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.pop("norm.bias"), r"missing \['norm.bias'\], unknown \[\]"),
        (lambda s: s.update(extra=np.ones(1)), r"missing \[\], unknown \['extra'\]"),
        (lambda s: s.update({"linears.1.weight": np.ones((3, 4))}), r"linears.1.weight has shape \(3, 3\).*\(3, 4\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change, named):
    net = Net()
    before, state = net.state_dict(), {name: value + 1 for name, value in net.state_dict().items()}
    change(state)
    with pytest.raises(ValueError, match=named):
        net.load_state_dict(state)
    assert all(np.array_equal(net.state_dict()[name], before[name]) for name in NAMES)


def test_the_second_name_of_a_tied_parameter_may_be_absent_or_equal_but_not_different():
    net = Net(tied=True)
    state = net.state_dict()
    net.load_state_dict(state)
    net.load_state_dict(state | {"linears.1.weight": state["linears.0.weight"]})
    with pytest.raises(ValueError, match="weight is tied to linears"):
        net.load_state_dict(state | {"linears.1.weight": state["linears.0.weight"] + 1})


def test_training_and_evaluation_reach_every_module():
    net = Net()
    net.linears.append(Dropout(0.5))
    assert all(m.training for m in net.modules()) and len(list(net.modules())) == 5
    assert net.eval() is net and not any(m.training for m in net.modules())
    assert net.train() is net and all(m.training for m in net.modules())


def test_assigning_to_a_parameter_copies_into_its_buffer():
    p = Parameter(np.zeros((2, 3), np.float32))
    value, grad = p.value, p.grad
    p.value, p.grad = np.ones((2, 3)), np.full((2, 3), 2)
    assert p.value is value and p.grad is grad and value.dtype == np.float32
    assert p.buffer.value.tolist() == [1] * 6 and p.buffer.grad.tolist() == [2] * 6
    p.grad += 1
    assert p.grad is grad and p.buffer.grad.tolist() == [3] * 6
    p.name = "w"
    with pytest.raises(ValueError, match=r"'w' has shape \(2, 3\), not \(3, 2\)"):
        p.value = np.ones((3, 2))
    with pytest.raises(ValueError, match=r"not \(3,\)"):  # which would broadcast
        p.grad = np.ones(3)
    assert repr(p) == "Parameter('w', shape=(2, 3), dtype=float32)"


def test_a_flat_buffer_keeps_values_and_holds_one_dtype():
    first, second = Parameter(np.array([[1.0, 2.0]])), Parameter(np.array([3.0]))
    flat = FlatBuffer([first, second])
    assert flat.value.tolist() == [1, 2, 3] and first.shape == (1, 2)
    flat.value += 1
    flat.grad += 5
    assert first.value.tolist() == [[2, 3]] and second.value.tolist() == [4] and second.grad.tolist() == [5]
    with pytest.raises(TypeError, match=r"float32.*float64"):
        FlatBuffer([first, Parameter(np.ones(2, np.float32))])


@pytest.mark.parametrize("layer", [Linear(2, 2), LayerNorm(2), Dropout(0.5)])
def test_a_backward_without_a_forward_is_refused(layer):
    with pytest.raises(AttributeError, match=f"{type(layer).__name__}: backward needs a forward"):
        layer.backward(np.ones(2, np.float32))


def test_spans_join_neighbours_of_one_kind_and_take_each_parameter_once():
    a, b, c, d = (Parameter(np.zeros(shape)) for shape in ((2, 2), (1, 3), (2,), (1,)))
    FlatBuffer([a, b, c, d])
    alone = Parameter(np.zeros(2))
    assert [(s.start, s.stop, s.decays) for s in spans([a, d, c, b, a])] == [(0, 7, True), (7, 10, False)]
    assert [(s.start, s.stop) for s in spans([d, a])] == [(0, 4), (9, 10)]
    assert [s.buffer for s in spans([alone, a])] == [alone.buffer, a.buffer]
    first, between, last = (Parameter(np.zeros((1, 2))) for _ in range(3))
    FlatBuffer([first, between, last])
    assert [(s.start, s.stop) for s in spans([first, last])] == [(0, 2), (4, 6)]  # a gap
    elsewhere = Parameter(np.zeros((2, 2)))
    assert [s.buffer for s in spans([elsewhere, last])] == [elsewhere.buffer, last.buffer]  # stop 4, start 4
    one, two = FlatBuffer(Parameter(np.zeros((1, 2))) for _ in range(2)), FlatBuffer([first, last])
    assert [s.buffer for s in spans([*one.parameters, *two.parameters])] == [one, two]  # buffer by buffer
    span = spans([c])[0]
    span.value[...], span.grad[...] = 1, 2
    assert c.value.tolist() == [1, 1] and c.grad.tolist() == [2, 2] and not b.value.any() and not d.value.any()


def test_a_frozen_buffer_has_no_gradients_and_forgets_what_is_added_to_them():
    net = Net()
    learning = net.linears[1].weight
    flat = FlatBuffer([p for p in net.parameters() if p is not learning])
    value = flat.value
    flat.freeze()
    assert flat.grad is None and flat.value is value and [p.trainable for p in net.parameters()] == [False] * 3 + [True]
    assert [span.buffer for span in spans(net.parameters())] == [learning.buffer]
    for p in net.parameters():
        p.grad += np.ones(p.shape, np.float32)
        p.grad[np.array([0])] += 1
    net.zero_grad()
    assert not learning.grad.any()
    moved = net.to(lambda x: x.astype(np.float64))
    assert flat.grad is None and all(p.value.dtype == np.float64 for p in moved.parameters())
    flat.freeze(False)
    assert all(p.trainable and p.grad.dtype == np.float64 and not p.grad.any() for p in net.parameters())
    net.norm.weight.grad += 1
    assert flat.grad.sum() == 3


def test_zero_grad_zeroes_the_modules_own_gradients_only():
    net, other = Net(), Net()
    FlatBuffer([*net.parameters(), *other.parameters()])
    for p in [*net.parameters(), *other.parameters()]:
        p.grad += 1
    net.zero_grad()
    assert not any(p.grad.any() for p in net.parameters()) and all(p.grad.all() for p in other.parameters())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_is_made_of_views_of_its_own_buffer(duplicate):
    net = Net(tied=True)
    FlatBuffer(net.parameters())
    twin = duplicate(net)
    assert twin.linears[0].weight is twin.linears[1].weight
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert np.array_equal(p.value, q.value)
        assert np.shares_memory(q.value, twin.norm.weight.buffer.value)
        assert np.shares_memory(q.grad, twin.norm.weight.buffer.grad)
        assert not np.shares_memory(p.value, q.value)


def test_a_move_takes_parameters_and_tables_and_forgets_what_was_saved():
    net = Net()
    net.rope = RotaryPositionalEmbedding(10.0, 2, 3)
    net.norm(np.ones((1, 3), np.float32))
    moved = net.to(lambda x: x.astype(np.result_type(x, np.float64)))
    assert moved is net and "saved" not in vars(net.norm)
    assert all(p.value.dtype == p.grad.dtype == np.float64 for p in net.parameters())
    assert net.rope.turn.dtype == np.complex128
    assert net.to("cpu").norm.weight.value.dtype == np.float64


def test_a_layer_of_a_whole_model_is_not_moved_by_itself():
    net = Net()
    FlatBuffer(net.parameters())
    with pytest.raises(ValueError, match="move the model"):
        net.norm.to(lambda x: x.astype(np.float64))
    assert net.norm.weight.value.dtype == np.float32


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="tpu"):
        Net().to("tpu")


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "3", None])
def test_a_size_that_is_no_integer_of_at_least_one_is_refused(size, unchecked):
    with pytest.raises(ValueError, match=f"width must be an integer of at least 1, not {size!r}"):
        check_positive(depth=1, width=size)
    check_positive(depth=np.int64(1))
