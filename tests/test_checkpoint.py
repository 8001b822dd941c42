import json
import os
import pickle

import numpy as np
import pytest
import safetensors.numpy

from numpygpt import checkpoint
from numpygpt.checkpoint import CheckpointError
from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM

CONFIG = TransformerConfig(vocab_size=5, context_length=4, d_model=8, num_layers=2, num_heads=2)
IDS = np.array([[0, 1, 2, 3]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_is_the_saved_one(tmp_path, dtype, tied):
    config = TransformerConfig(**{**vars(CONFIG), "tie_embeddings": tied})
    model = TransformerLM(config, dtype=dtype, rng=0)
    checkpoint.save(tmp_path / "new" / "folder", model, {"step": 7})
    loaded, state = checkpoint.load(tmp_path / "new" / "folder")
    assert state == {"step": 7}
    assert loaded.config == config
    assert loaded.flat.value.dtype == dtype
    assert np.array_equal(loaded.forward(IDS), model.forward(IDS))


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    model = TransformerLM(CONFIG, rng=0)
    checkpoint.save(tmp_path, model)

    def fail(handle):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, TransformerLM(CONFIG, rng=1))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert np.array_equal(checkpoint.load(tmp_path)[0].flat.value, model.flat.value)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def write_pickle(path):
    path.write_bytes(pickle.dumps(Bomb()))


def write_foreign(path):
    path.write_bytes(safetensors.numpy.save({"x": np.zeros(3)}))


def write_truncated(path):
    checkpoint.save(path.parent, TransformerLM(CONFIG, rng=0))
    path.write_bytes(path.read_bytes()[:-100])


def write_header(path, **changes):
    header = {"format": checkpoint.FORMAT, "config": vars(CONFIG), "state": {}, **changes}
    tensors = TransformerLM(CONFIG, rng=0).state_dict()
    path.write_bytes(safetensors.numpy.save(tensors, {"numpygpt": json.dumps(header)}))


def write_integers(path):
    header = {"format": checkpoint.FORMAT, "config": vars(CONFIG), "state": {}}
    tensors = {name: value.astype(int) for name, value in TransformerLM(CONFIG, rng=0).state_dict().items()}
    path.write_bytes(safetensors.numpy.save(tensors, {"numpygpt": json.dumps(header)}))


def write_config(**changes):
    return lambda path: write_header(path, config={**vars(CONFIG), **changes})


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "doesn't exist"),
        (lambda path: path.write_bytes(b""), "no safetensors file"),
        (write_pickle, "no safetensors file"),
        (write_truncated, "damaged"),
        (write_foreign, "wasn't written by this program"),
        (lambda path: write_header(path, format=99), "99"),
        (write_config(d_model=16), "shape"),
        (write_config(num_layers=3), "missing"),
        (write_config(num_layers=1), "unknown"),
        (write_config(wings=2), "wings"),
        (lambda path: write_header(path, config=[1]), "no model of ours"),
        (lambda path: write_header(path, state=None), "state"),
        (write_integers, "floating-point"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, monkeypatch, write, said):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    write(path)
    with pytest.raises(CheckpointError, match=said) as raised:
        checkpoint.load(tmp_path)
    assert str(path) in str(raised.value)
    assert not (tmp_path / "exploded").exists()
