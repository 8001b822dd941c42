"""The page of a gradient's flow: every array is the layers' own, and beside each value stands its gradient."""

import contextlib
import functools
import html
import re
import runpy
import sys

import numpy as np
import pytest
from running import SCRIPTS, run

from numpygpt import checkpoint
from numpygpt.layers import CrossEntropy
from numpygpt.model import TransformerConfig, TransformerLM
from numpygpt.tokenizer import CharTokenizer

sys.path.insert(0, str(SCRIPTS))
from benchmarks.sizes import DRESSES as benchmarked
from tracing import record
from tracing.layout import Row, lay_out
from tracing.page import Book, write
from tracing.picture import png, snapshot
from tracing.source import PACKAGE, equation_of, statements

TEXT = "To be"
DRESSES = {
    **benchmarked,
    "post": {"norm_position": "post", "ffn": "geglu", "positions": "sinusoidal"},
    "grouped": {"num_kv_heads": 2, "num_heads": 4, "rope_layout": "half", "ffn": "reglu", "dropout": 0.3},
    "one head": {"num_heads": 1, "ffn": "bilinear", "positions": "none", "norm": "layernorm"},
    "plain": {"ffn": "silu", "num_kv_heads": 1, "positions": "none", "norm_position": "post", "bias": True},
}


def make(dress, dtype=np.float64, **sizes):
    """A small model in a dress, with biases and gains that aren't 0 and 1, and ids for it."""
    small = {"vocab_size": 5, "context_length": 8, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 6}
    model = TransformerLM(TransformerConfig(**small | DRESSES[dress] | sizes), dtype=dtype, rng=0)
    rng = np.random.default_rng(1)
    for p in model.parameters():
        p.value = p.value + 0.3 * rng.standard_normal(p.shape).astype(dtype)
    return model, np.array([3, 1, 4, 1, 0, 2])


def rows(sections):
    return [row for top in sections for part in top.sections() for row in part.items if isinstance(row, Row)]


def whole(step):
    """The array of a step, none of which was left out, in its own shape; heads of a group are rows again."""
    assert step.seen.block == (1, 1)
    return step.seen.panels.reshape(step.seen.shape)


@pytest.fixture(scope="module")
def small():
    """A run whose attention has no groups, so that all its arrays are as the layers have them."""
    model, ids = make("default")
    return model, record.trace(model, ids)


def steps(run, path, name, backward=False):
    return [s for s in run.recorder.steps if (s.call.path, s.name, s.backward) == (path, name, backward)]


# Tracing


@pytest.mark.parametrize("dress", DRESSES)
def test_a_traced_model_computes_the_same_bits(dress):
    (model, ids), (other, _) = make(dress, np.float32), make(dress, np.float32)
    traced = record.trace(model, ids)
    loss = CrossEntropy()
    logits = other.forward(ids[:-1])
    assert traced.loss == loss.forward(logits, ids[1:])
    other.backward(loss.backward())
    assert np.array_equal(traced.logits, logits)
    assert np.array_equal(model.flat.grad, other.flat.grad)


@pytest.mark.parametrize("length", [6, 200])  # the second ends in an error
def test_another_tracer_goes_on_afterwards(length):
    def other(*_):
        return None

    model, ids = make("default")
    before = sys.gettrace()
    sys.settrace(other)
    try:
        with pytest.raises(ValueError, match="context_length") if length > 8 else contextlib.nullcontext():
            record.trace(model, np.resize(ids, length))
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("dress", DRESSES)
def test_arrays_that_hold_the_same_numbers_are_still_told_apart(dress):
    (model, ids), (blank, _) = make(dress), make(dress)
    blank.flat.value[:] = 0
    made, zeros = ([s.place.statement for s in record.trace(m, ids).recorder.steps if s.place] for m in (model, blank))
    assert zeros == made


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("length", [6, 70])  # 70: attention in two blocks
def test_every_numbered_line_that_runs_is_on_the_page(dress, length):
    ran = set()

    def note(frame, event, _):
        if frame.f_code.co_filename.startswith(str(PACKAGE)):
            if event == "line":
                ran.add((frame.f_code.co_filename, frame.f_lineno))
            return note

    model, ids = make(dress, context_length=length)
    ids, loss = np.resize(ids, length), CrossEntropy()
    before = sys.gettrace()
    sys.settrace(note)
    try:
        loss.forward(model.forward(ids[:-1]), ids[1:])
        model.backward(loss.backward())
    finally:
        sys.settrace(before)
    tables = {path: statements(path) for path in PACKAGE.rglob("*.py")}
    run_lines = [tables[p][n] for p in tables for f, n in ran if f == str(p) and n in tables[p]]
    expected = {s for s in run_lines if s.numbers}
    assert len(expected) > 30
    model, _ = make(dress, context_length=length)
    traced = record.trace(model, ids)
    sections = lay_out(traced.recorder)
    cells = [cell for row in rows(sections) for cell in (row.value, row.gradient) if cell and not cell.again]
    places = [place for cell in cells for place in (cell.step.place, *cell.step.also) if place]
    assert {place.statement for place in places} >= expected
    made = [cell.step for cell in cells if cell.step.number]
    assert sorted(step.number for step in made) == list(range(1, len(traced.recorder.steps) + 1))  # each once


def test_the_arrays_are_those_of_the_equations(small):
    model, run = small
    (x,) = steps(run, "token_embeddings", "returned")
    x = whole(x)
    assert np.array_equal(x, model.token_embeddings.weight.value[run.ids[:-1]])
    r, h = (whole(steps(run, "layers.0.ln1", name)[0]) for name in "rh")
    np.testing.assert_allclose(r, 1 / np.sqrt(1e-5 + np.mean(x**2, axis=-1, keepdims=True)))
    np.testing.assert_allclose(h, x / np.sqrt(1e-5 + np.mean(x**2, axis=-1, keepdims=True)))
    dh, less, dx = (whole(step) for step in steps(run, "layers.0.ln1", "dx", backward=True))
    s = whole(steps(run, "layers.0.ln1", "s", backward=True)[0])
    np.testing.assert_allclose(less, dh - s * h)  # in place, and all three states are kept
    np.testing.assert_allclose(dx, less * r)
    bare, masked = (whole(step) for step in steps(run, "layers.0.attn.attention", "scores"))
    hidden = ~np.tri(5, dtype=bool)
    assert np.all(np.isfinite(bare)) and np.all(masked[:, hidden] == -np.inf)
    assert np.array_equal(masked[:, ~hidden], bare[:, ~hidden])
    (weights,) = steps(run, "layers.0.attn.attention", "e / z")
    np.testing.assert_allclose(whole(weights), np.exp(masked) / np.exp(masked).sum(-1, keepdims=True))
    last = run.recorder.calls["loss", False].returned[0].step
    assert whole(last) == run.loss


def test_heads_that_share_keys_are_shown_one_by_one():
    model, ids = make("grouped")
    traced = record.trace(model, ids)
    q = whole(steps(traced, "layers.0.attn.q_rope", "returned")[0])  # kv head, position, head in the group, feature
    k = whole(steps(traced, "layers.0.attn.k_rope", "returned")[0])
    scores = steps(traced, "layers.0.attn.attention", "scores")[0].seen.panels
    assert scores.shape == (4, 5, 5)
    for head in range(4):
        expected = q[head // 2, :, head % 2] @ k[head // 2, :, 0].T / np.sqrt(2)
        np.testing.assert_allclose(scores[head], expected)


# Value and gradient


def loss_with_a_step_moved(dress, number, by):
    """The loss if a step's array is moved right after its line."""
    model, ids = make(dress)
    original = record.Recorder._step

    def moving(self, call, name, value, *rest):
        known = len(self.steps)
        step = original(self, call, name, value, *rest)
        if len(self.steps) > known and step.number == number:
            value += by.reshape(value.shape)
        return step

    loss = CrossEntropy()
    recorder = record.Recorder({**dict(model.named_modules()), "loss": loss})
    with pytest.MonkeyPatch.context() as patch, recorder.recording():
        patch.setattr(record.Recorder, "_step", moving)
        return loss.forward(model.forward(ids[:-1]), ids[1:])


def loss_with_an_input_moved(dress, path, i, by):
    """The loss if what a module is given is moved, for it alone."""
    model, ids = make(dress)
    loss = CrossEntropy()
    module = loss if path == "loss" else dict(model.named_modules())[path]
    original = module.forward

    def moved(*args, **kwargs):
        args = list(args)
        args[i] = args[i] + by.reshape(args[i].shape)
        return original(*args, **kwargs)

    module.forward = moved
    return loss.forward(model.forward(ids[:-1]), ids[1:])


def loss_with_a_parameter_moved(dress, path, name, by):
    model, ids = make(dress)
    p = getattr(dict(model.named_modules())[path], name)
    p.value = p.value + by
    return CrossEntropy().forward(model.forward(ids[:-1]), ids[1:])


@pytest.mark.parametrize("dress", DRESSES)
def test_beside_each_value_stands_its_gradient(dress, unchecked):  # types, checked elsewhere, take half of the time
    model, ids = make(dress)
    traced = record.trace(model, ids)
    rng, checked = np.random.default_rng(2), 0
    for part in [part for top in lay_out(traced.recorder) for part in top.sections()]:
        inputs = 0
        for row in [row for row in part.items if isinstance(row, Row)]:
            cell, number = row.value, inputs
            inputs += cell is not None and cell.role == "input"
            if cell is None or row.gradient is None or not cell.step.seen.shape:
                continue
            if cell.role == "input":
                loss = functools.partial(loss_with_an_input_moved, dress, part.path, number)
            elif cell.role == "parameter":
                if model.config.tie_embeddings and part.path == "lm_head":
                    continue  # half of the sum that stands at the embedding
                loss = functools.partial(loss_with_a_parameter_moved, dress, part.path, cell.step.name)
            else:
                loss = functools.partial(loss_with_a_step_moved, dress, cell.step.number)
            value, gradient = cell.step.seen, row.gradient.step.seen
            by = rng.standard_normal(value.shape)
            expected = (loss(1e-5 * by) - loss(-1e-5 * by)) / 2e-5
            group = model.layers[0].attn.group if cell.step.name == "scores" else 1
            slope = np.sum(record.by_head(by, group).reshape(-1) * gradient.panels.reshape(-1))
            scale = np.linalg.norm(by) * max(gradient.norm, 1e-3)
            assert abs(slope - expected) < 1e-6 * scale, (part.path, cell.step.name, slope, expected)
            checked += 1
    assert checked > 35


def outline(run, path):
    """The rows of a module: value | gradient, each with its numbers; (...) is a module inside, ~ what is made there."""

    def text(cell):
        if cell is None:
            return ""
        numbers = cell.step.place.statement.numbers if cell.step.place else ()
        return " ".join(["~" * cell.again + (cell.name or cell.step.name), *numbers])

    (part,) = [part for top in lay_out(run.recorder) for part in top.sections() if part.path == path]
    return [f"{text(i.value)} | {text(i.gradient)}" if isinstance(i, Row) else f"({i.path})" for i in part.items]


def test_forward_reads_down_and_backward_up(small):
    _, run = small
    assert outline(run, "layers.0.ln1") == [
        "~x 1 | dx 8",
        " | dx",
        " | s 7 6",
        "mean_square | ",
        "r 1 | ",
        "h 2 | dx 5",
        "weight | weight.grad 4",
        "returned 3 | ~returned 10",
    ]
    assert outline(run, "layers.0.attn.attention") == [
        "~q 7 6 | dq[..., rows, :] 9",
        "~k 7 6 | dk[..., keys, :] 10",
        "~v 2 | dv[..., keys, :] 5",
        "q | ",
        "scores 1 | ",
        "scores 2 | da 8",
        " | da 7",
        " | da 6",
        " | do_z",
        "e 1 | ",
        "z 3 | ",
        "e / z 3 | ",
        "o 4 | do 7",
    ]
    names = ("q_proj", "k_proj", "v_proj", "q_rope", "k_rope", "attention", "output_proj")
    inside = [f"(layers.0.attn.{name})" for name in names]
    split = ["q 2 | ~returned 9 8", "k 2 | ~returned 9 8", "v 2 | ~dv[..., keys, :] 5"]
    assert outline(run, "layers.0.attn") == ["~x 3 | returned 10", *inside[:3], *split, *inside[3:]]


# The picture


def pixels(data):
    """Read a PNG without a filter back, as rows of RGBA."""
    import struct
    import zlib

    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    parts, at = {}, 8
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        parts[kind] = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + parts[kind]),)
        at += 12 + size
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + width)
    assert not rows[:, 0].any()
    palette = np.frombuffer(parts[b"PLTE"], np.uint8).reshape(-1, 3)
    return np.dstack([palette[rows[:, 1:]], np.frombuffer(parts[b"tRNS"], np.uint8)[rows[:, 1:]]])


def test_a_picture_is_transparent_at_zero_and_full_at_the_largest():
    picture = pixels(png(np.array([[0, 1, -1], [0.5, -np.inf, 2]]), 2.0))
    assert picture.shape == (2, 3, 4)
    assert picture[..., 3].tolist() == [[0, 132, 132], [66, 255, 255]]
    green, purple, grey = (0x2F, 0x8F, 0x4E), (0x9A, 0x6B, 0xD0), (0x8A, 0x8A, 0x8A)
    assert [tuple(picture[at][:3]) for at in [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]] == [
        green,
        purple,
        green,
        grey,
        green,
    ]
    assert not pixels(png(np.zeros((1, 2)), 0.0))[..., 3].any()


def test_a_large_array_is_reduced_to_the_largest_of_each_block():
    x = np.random.default_rng(0).standard_normal((3, 100, 130))
    seen = snapshot(x)
    assert seen.shape == (3, 100, 130) and seen.panels.shape == (3, 50, 44) and seen.block == (2, 3)
    block = x[1, 2:4, 3:6].reshape(-1)
    assert seen.panels[1, 1, 1] == block[np.abs(block).argmax()]
    assert seen.panels[2, 49, 43] == x[2, 98:, 129][np.abs(x[2, 98:, 129]).argmax()]
    assert seen.norm == pytest.approx(np.linalg.norm(x)) and seen.largest == np.abs(x).max()
    x[1, 2] = -np.inf
    assert snapshot(x).panels[1, 1, 1] == -np.inf and np.isfinite(snapshot(x).norm)
    assert snapshot(np.array(2.0)).panels.shape == (1, 1, 1)
    assert snapshot(np.array([1 + 2j, 3])).panels.tolist() == [[[1, 2, 3, 0]]]


# The page


def page_of(run, model, book=None):
    return write(run, model.config, CharTokenizer("abcde"), book)


def test_the_page_stands_alone_and_is_well_formed(small):
    from html.parser import HTMLParser

    model, run = small
    page = page_of(run, model)
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert set(re.findall(r'src="([^,"]*)', page)) == {"data:image/png;base64"}
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', page)) <= set(ids)
    open_tags = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "img"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Check().feed(page)
    assert not open_tags


def test_the_page_tells_loss_predictions_lines_and_numbers(small):
    model, run = small
    page = page_of(run, model)
    assert f"{run.loss:.4f}" in page
    p = np.exp(run.logits[0]) / np.exp(run.logits[0]).sum()
    assert f"{100 * p[run.ids[1]]:.1f} %" in page
    best = "abcde"[p.argmax()]
    assert f'<span class="token">{best}</span> {100 * p.max():.1f} %' in page
    assert "dx -= s * h</code>\nlayers.0.ln1, norm.py" in page
    (h,) = steps(run, "layers.0.ln1", "h")
    assert f"{whole(h)[0, 0]}  {whole(h)[0, 1]}" in page
    assert f"norm {h.seen.norm:.3g} · ±{h.seen.largest:.3g}" in page
    assert html.escape(r"RMSNorm (8): \bar x_{nc} = r_n\big(\bar h_{nc} - s_n\, h_{nc}\big)") in page
    assert page.count('<figcaption>head 1</figcaption><div class="axes">') == 7  # scores twice, e, e / z, da thrice
    assert '<div class="queries"><span>d</span><span>b</span><span>e</span>' in page


def test_an_equation_is_that_of_the_class_the_module_or_the_only_class_there():
    layers = PACKAGE / "layers"
    assert equation_of("8", layers / "norm.py", "RMSNorm.backward").key == "RMSNorm-8"
    assert equation_of("A", layers / "activation.py", "SiLU.backward").key == "activation-A"
    assert equation_of("1", layers / "softmax.py", "exponentials").key == "Softmax-1"
    assert equation_of("1", PACKAGE / "special.py", "normal_cdf").key == "special-1"
    assert equation_of("99", layers / "norm.py", "RMSNorm.backward") is None


def test_numbers_lead_into_a_book(small, tmp_path):
    model, run = small
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "norms.html").write_text('<div id="RMSNorm-8">')
    page = page_of(run, model, Book.read(tmp_path / "book", tmp_path / "pages" / "trace.html"))
    assert '<a href="../book/norms.html#RMSNorm-8" title="RMSNorm (8): ' in page
    assert page.count("norms.html") == 3  # ln1, ln2, ln_final


def test_a_block_that_is_left_out_still_shows_what_goes_in_and_out():
    model, ids = make("post", num_layers=3)
    traced = record.trace(model, ids, [1])
    assert {path.split(".")[1] for path, _ in traced.recorder.calls if path.startswith("layers")} == {"1"}
    out = [s for s in traced.recorder.steps if s.call.path == "" and s.name == "x"]
    assert len(out) == 2
    found = {row.value.step: row.gradient for row in rows(lay_out(traced.recorder)) if row.value}
    assert all(found[step] is not None for step in out)
    assert "layers.2" not in page_of(traced, model)


# The script


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Run it in this process: returns status, output and errors."""
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(SCRIPTS / "trace.py"))["main"]

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["trace.py", *map(str, args)])
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def trained(tmp_path):
    model = TransformerLM(TransformerConfig(7, 8, 8, 2, 2, d_ff=6, dropout=0.5), rng=0)
    tokenizer = CharTokenizer(" &<Tbeo")
    checkpoint.save(tmp_path / "run", model, state={"tokenizer": tokenizer.fingerprint})
    tokenizer.save(tmp_path / "run")
    return model.eval()


def test_one_command_makes_a_page(tmp_path):
    result = run("trace.py", "--text", TEXT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"loss \d\.\d{4}; saved trace\.html \(0\.\d MB, \d+ arrays\)\n", result.stdout)
    assert result.stderr == ""
    first = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert "“To␣be”" in first
    run("trace.py", "--text", TEXT, cwd=tmp_path)
    assert (tmp_path / "trace.html").read_text(encoding="utf-8") == first
    run("trace.py", "--text", TEXT, "--seed", 1, cwd=tmp_path)
    assert (tmp_path / "trace.html").read_text(encoding="utf-8") != first


def test_flags_make_the_model(script, tmp_path):
    flags = "--norm layernorm --ffn gelu --positions learned --bias --d-model 12 --num-heads 3 --d-ff 5 --num-layers 2"
    status, _, errors = script(*flags.split(), "--layer", 1, "--out", "new/page.html", "--dropout", 0.2)
    assert status == 0, errors
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    for part in ("LayerNorm", "GELU", "LearnedPositions", "Dropout", "<figcaption>head 2"):
        assert part in page
    assert "layers.0" not in page
    assert "layers.1.ffn.w1" in page


def test_a_trained_model_is_read_with_its_tokenizer_and_drops_nothing(script, trained, tmp_path):
    text = "be <&>"[:5]
    status, output, errors = script("--model", "run", "--text", text)
    assert status == 0, errors
    ids = CharTokenizer(" &<Tbeo").encode(text).astype(int)
    loss = CrossEntropy().forward(trained.forward(ids[:-1]), ids[1:])
    assert output.startswith(f"loss {loss:.4f}; ")
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert "be␣&lt;&amp;" in page and "layers.1.attn" in page and "<&" not in page


def test_a_model_of_byte_pairs_is_read(script, tmp_path):
    pytest.importorskip("tokenizers")
    from small_gguf import library_tokenizer, small_model

    from numpygpt.tokenizer import BPETokenizer

    tokenizer = BPETokenizer(library_tokenizer())
    checkpoint.save(tmp_path / "run", small_model(), state={"tokenizer": tokenizer.fingerprint})
    tokenizer.save(tmp_path / "run")
    status, _, errors = script("--model", "run", "--text", "the inn at 9", "--layer", 0)
    assert status == 0, errors
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert '<div class="keys long"><span>the</span>' in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", ""], "--text is empty"),
        (["--text", "T"], "'T' is one token"),
        (["--text", "a\ud800"], "half"),
        (["--layer", "1"], "--layer 1 isn't there: the model has layers 0 to 0"),
        (["--layer", "-1"], "--layer -1 isn't there"),
        (["--d-model", "7"], "num_heads 2 doesn't divide d_model 7"),
        (["--seed", "-1"], "seed must be"),
        (["--norm", "batchnorm"], "batchnorm"),
        (["--model", "nowhere"], "'nowhere'"),
        (["--model", "run", "--d-model", "8"], "--d-model is for an untrained model"),
        (["--model", "run", "--text", "To by"], "'y'"),
        (["--model", "run", "--text", "To be To be"], "context_length 8"),
        (["--book", "run"], "--book run holds no page with equations"),
        (["--out", "run/model.safetensors/page.html"], "model.safetensors"),
        (["--out", "run"], "run"),
    ],
)
def test_a_mistake_is_named_in_one_line_and_nothing_written(script, trained, tmp_path, flags, said):
    before = sorted(path.name for path in tmp_path.rglob("*"))
    status, output, errors = script(*flags)
    assert (status, output) == (2, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1 and said in errors
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
