import contextlib
import dataclasses
import errno
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from numpygpt import checkpoint, durable, tensorfile
from numpygpt.checkpoint import CheckpointError
from numpygpt.config import RopeScaling, TransformerConfig
from numpygpt.data import CharTokenizer
from numpygpt.model import TransformerLM
from numpygpt.optim import AdamW

CONFIG = TransformerConfig(vocab_size=5, context_length=4, d_model=8, num_layers=2, num_heads=2)
IDS = np.array([[0, 1, 2, 3]])
FILES = ["model.safetensors", "config.json", "training.safetensors", "tokenizer.json"]


LAYERNORM = {"norm": "layernorm", "positions": "learned", "ffn": "gelu_tanh"}
KINDS = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "half": {"rope_layout": "half", "num_kv_heads": 1},
    "grouped": {"num_kv_heads": 1, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)},
    "gpt2": {**LAYERNORM, "bias": True, "tie_embeddings": True},
    "none of Hugging Face's": {**LAYERNORM, "norm_position": "post", "rope_layout": "half"},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_loaded_model_is_the_saved_one(tmp_path, dtype, changes):
    config = dataclasses.replace(CONFIG, **changes)
    model = TransformerLM(config, dtype=dtype, rng=0)
    checkpoint.save(tmp_path / "new" / "folder", model, state={"step": 7})
    loaded, state = checkpoint.load(tmp_path / "new" / "folder")
    assert state == {"step": 7}
    assert loaded.config == config
    assert loaded.flat.value.dtype == dtype
    assert np.array_equal(loaded.flat.value, model.flat.value)
    assert np.array_equal(loaded.forward(IDS), model.forward(IDS))


def test_weights_have_hugging_faces_names_where_it_has_such_models(tmp_path):
    for name, first, changes in (
        ("llama", "lm_head.weight", {}),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", KINDS["gpt2"]),
        ("ours", "layers.0.attn.k_proj.weight", {"norm_position": "post"}),
    ):
        checkpoint.save(tmp_path / name, TransformerLM(dataclasses.replace(CONFIG, **changes), rng=0))
        assert min(safetensors.numpy.load_file(tmp_path / name / "model.safetensors")) == first
        assert (tmp_path / name / "config.json").exists() == (name != "ours")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def write_pickle(path):
    path.write_bytes(pickle.dumps(Bomb()))


def write_object_array(path):
    with path.open("wb") as file:
        np.save(file, np.array([Bomb()], object), allow_pickle=True)


def write_foreign(path):
    path.write_bytes(safetensors.numpy.save({"x": np.zeros(3)}))


def write_truncated(path):
    checkpoint.save(path.parent, TransformerLM(CONFIG, rng=0))
    path.write_bytes(path.read_bytes()[:-100])  # lm_head comes last


def write_without_checksums(path):
    checkpoint.save(path.parent, TransformerLM(CONFIG, rng=0))
    header = {"format": checkpoint.FORMAT, "config": vars(CONFIG), "state": {}}
    tensors = safetensors.numpy.load_file(path)
    path.write_bytes(safetensors.numpy.save(tensors, {"numpygpt": json.dumps(header)}))


def write_header(path, tensors=None, **changes):
    header = {"format": checkpoint.FORMAT, "config": vars(CONFIG), "state": {}, **changes}
    tensorfile.write(path, tensors or TransformerLM(CONFIG, rng=0).state_dict(), header)


def write_integers(path):
    state = TransformerLM(CONFIG, rng=0).state_dict()
    write_header(path, {name: value.astype(int) for name, value in state.items()})


def write_config(**changes):
    return lambda path: write_header(path, config={**vars(CONFIG), **changes})


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "doesn't exist"),
        (lambda path: path.write_bytes(b""), "no safetensors file"),
        (write_pickle, "no safetensors file"),
        (write_object_array, "no safetensors file"),
        (write_truncated, r"damaged.*cut off within or before the tensor [a-z0-9_.]+$"),
        (write_without_checksums, "damaged"),
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


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_model_of_the_format_with_our_names_is_still_read(tmp_path, changes):
    config = dataclasses.replace(CONFIG, **changes)
    model, fields = TransformerLM(config, rng=0), dataclasses.asdict(config)
    if config.rope_scaling is None:
        del fields["rope_scaling"]
    write_header(tmp_path / "model.safetensors", model.state_dict(), format=2, config=fields)
    loaded, _ = checkpoint.load(tmp_path)
    assert loaded.config == config
    assert np.array_equal(loaded.flat.value, model.flat.value)


def test_a_model_of_the_format_without_checksums_is_still_read(tmp_path):
    model = TransformerLM(CONFIG, rng=0)
    header = {"format": 1, "config": vars(CONFIG), "state": {"step": 3}}
    content = safetensors.numpy.save(model.state_dict(), {"numpygpt": json.dumps(header)})
    (tmp_path / "model.safetensors").write_bytes(content)
    loaded, state = checkpoint.load(tmp_path)
    assert state == {"step": 3}
    assert np.array_equal(loaded.flat.value, model.flat.value)


TOKENIZER = CharTokenizer.train("abcde")


def trained(step):
    """A model and its optimiser after some steps with random gradients."""
    model = TransformerLM(CONFIG, rng=0)
    optimizer = AdamW(model.parameters(), lr=0.01)
    rng = np.random.default_rng(1)
    for _ in range(step):
        model.flat.grad[...] = rng.standard_normal(model.flat.grad.size)
        optimizer.step()
    return model, optimizer


def save_step(run, step, given=None):
    model, optimizer = given or trained(step)
    state = {"step": step}
    checkpoint.save(checkpoint.of_step(run, step), model, optimizer, state, TOKENIZER)
    return checkpoint.of_step(run, step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_loaded_optimiser_goes_on_to_the_same_bits(tmp_path):
    folder = save_step(tmp_path, 3)
    model, _ = checkpoint.load(folder)
    optimizer = AdamW(model.parameters(), lr=0.01)
    checkpoint.load_optimizer(folder, optimizer)
    saved_model, saved = trained(3)
    for m, o in ((model, optimizer), (saved_model, saved)):
        m.flat.grad[...] = np.arange(m.flat.grad.size) % 7
        o.step()
    assert optimizer.t == saved.t == 4
    assert np.array_equal(model.flat.value, saved_model.flat.value)
    for name, moment in saved.state_dict().items():
        assert np.array_equal(optimizer.state_dict()[name], moment)


def test_a_run_loads_its_newest_checkpoint(tmp_path):
    for step in (1, 10, 9):
        save_step(tmp_path, step)
    assert checkpoint.load(tmp_path)[1]["step"] == 10
    assert checkpoint.load(tmp_path / "step-00000009")[1] == {"step": 9, "tokenizer": TOKENIZER.fingerprint}


def test_nothing_is_written_over_a_checkpoint(tmp_path):
    folder = save_step(tmp_path, 1)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="step-00000001"):
        save_step(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert (folder / "model.safetensors").read_bytes() == before


def test_the_newest_and_the_best_are_kept_and_leftovers_are_not(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save_step(tmp_path, step)
    (tmp_path / ".tmp-step-00000006-x").mkdir()
    (tmp_path / ".tmp-config.json-x").touch()
    (tmp_path / "metrics.jsonl").touch()
    checkpoint.prune(tmp_path, 2, checkpoint.of_step(tmp_path, 2))
    assert names(tmp_path) == ["metrics.jsonl", "step-00000002", "step-00000004", "step-00000005"]


def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    write = Path.write_bytes
    for failing in ("model.safetensors", "training.safetensors"):

        def write_half(path, content, failing=failing):
            if path.name == failing:
                write(path, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write(path, content)

        monkeypatch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="No space left"):
            save_step(tmp_path, 2)
        assert names(tmp_path) == ["step-00000001"]
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        save_step(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "step-00000001", {})


def in_child(action):
    """Run `action` in a forked process; return its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_death_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    """Die at the first, second, ... of all openings, renames, deletions, made while saving and pruning."""
    save_step(tmp_path / "start", 1)
    save_step(tmp_path / "start", 2)
    found, deaths, third = [], 0, trained(3)
    while True:
        run = tmp_path / "run"
        shutil.copytree(tmp_path / "start", run)

        def save_and_die(run=run, deaths=deaths):
            left = deaths

            def count(event, args):
                nonlocal left
                if event.startswith(("os.", "shutil.")) or event == "open":
                    left -= 1
                    if left < 0:
                        os._exit(9)

            sys.addaudithook(count)
            save_step(run, 3, third)
            checkpoint.prune(run, 1, checkpoint.of_step(run, 2))

        status = in_child(save_and_die)
        for folder in checkpoint.checkpoints(run):
            checkpoint.check(folder)
        found.append(int(checkpoint.find(run).name[5:]))
        durable.remove_leftovers(run)
        assert all(name.startswith("step-") for name in names(run))
        if status == 0:
            break
        assert status == 9
        deaths += 1
        shutil.rmtree(run)
    assert names(run) == ["step-00000002", "step-00000003"]
    assert found == sorted(found)  # step 2 until the rename, step 3 from there on
    assert set(found) == {2, 3}
    assert deaths > 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("size", [0, 1, 5000, 20000])
def test_a_limit_on_the_size_of_files_is_survived(tmp_path, size):
    """The kernel itself refuses to write on, in the middle of a file."""
    resource = pytest.importorskip("resource")
    save_step(tmp_path, 1)

    def save_within_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with contextlib.suppress(OSError):
            save_step(tmp_path, 2)
            os._exit(5)

    assert in_child(save_within_limit) == 0
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "step-00000001", {})


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found_and_the_one_before_taken(tmp_path, name):
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2) / name
    content = path.read_bytes()
    lengths = {*range(0, len(content), max(len(content) // 9, 1)), 1, 8, 9, len(content) - 1}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        found, damaged = checkpoint.newest_whole(tmp_path)
        assert found == tmp_path / "step-00000001", length
        assert str(path) in str(damaged[tmp_path / "step-00000002"])
    path.unlink()
    _, damaged = checkpoint.newest_whole(tmp_path)
    assert f"{path} doesn't exist" in str(damaged[tmp_path / "step-00000002"])


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, name):
    path = save_step(tmp_path, 1) / name
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(content), size=min(len(content), 25), replace=False):
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=name):
            checkpoint.check(path.parent)


def test_bit_rot_in_a_tensor_names_it(tmp_path):
    path = save_step(tmp_path, 1) / "model.safetensors"
    content = bytearray(path.read_bytes())
    header_length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_length])
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        rotten = content.copy()
        rotten[8 + header_length + header[name]["data_offsets"][0]] ^= 1
        path.write_bytes(rotten)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors is damaged: the tensor {name} "):
            checkpoint.load(path.parent)


def test_moments_of_another_moment_or_model_are_refused(tmp_path):
    one, other = save_step(tmp_path, 1), save_step(tmp_path, 2)
    shutil.copy(one / "training.safetensors", other / "training.safetensors")
    with pytest.raises(CheckpointError, match="belongs to another"):
        checkpoint.check(other)
    wide = TransformerLM(TransformerConfig(**{**vars(CONFIG), "d_model": 16}), rng=0)
    deep = TransformerLM(TransformerConfig(**{**vars(CONFIG), "num_layers": 3}), rng=0)
    flat = TransformerLM(TransformerConfig(**{**vars(CONFIG), "num_layers": 1}), rng=0)
    for model, said in (
        (wide, r"m\.token_embeddings\.weight"),
        (deep, "missing.*layers.2"),
        (flat, "unknown.*layers.1"),
    ):
        optimizer = AdamW(model.parameters())
        with pytest.raises(CheckpointError, match=said) as raised:
            checkpoint.load_optimizer(one, optimizer)
        assert str(one / "training.safetensors") in str(raised.value)
        assert optimizer.t == 0
        assert not any(m.any() for m in optimizer.m)


def test_a_checkpoint_without_moments_cannot_be_gone_on_from(tmp_path):
    checkpoint.save(checkpoint.of_step(tmp_path, 1), trained(1)[0])
    found, damaged = checkpoint.newest_whole(tmp_path)
    assert found is None
    assert "training.safetensors doesn't exist" in str(damaged[tmp_path / "step-00000001"])


def test_a_damaged_checkpoint_set_aside_frees_its_name(tmp_path):
    for _ in range(2):
        aside = checkpoint.set_aside(save_step(tmp_path, 1))
        assert names(tmp_path) == [aside.name] == ["damaged-step-00000001"]


def test_a_lock_is_held_by_one_and_leaves_no_trace(tmp_path):
    folder = tmp_path / "a" / "b"
    with durable.locked(folder), pytest.raises(BlockingIOError, match=f"at work in {folder}"), durable.locked(folder):
        pass
    assert list(tmp_path.iterdir()) == []
    with durable.locked(folder):
        (folder / "file").touch()
    with durable.locked(folder):
        assert [path.name for path in folder.iterdir()] == ["file"]
    with pytest.raises(FileExistsError), durable.locked(folder / "file"):
        pass
