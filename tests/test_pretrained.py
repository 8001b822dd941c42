"""A Hugging Face folder is opened with what belongs to it: its tokenizer, its ends, its template."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import small_gguf
from running import run

from numpygpt import checkpoint, huggingface, pretrained
from numpygpt.chat import Conversation
from numpygpt.data import DataError
from numpygpt.sample import generate
from numpygpt.tensorfile import CheckpointError

pytest.importorskip("tokenizers")

TOKENIZER_CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>", "special": True},
    "pad_token": None,
    "chat_template": small_gguf.TEMPLATE,
}


@pytest.fixture
def folder(tmp_path):
    """A folder made by hand, whose weights' file doesn't say that we wrote it."""
    folder = tmp_path / "model"
    huggingface.save(folder, small_gguf.small_model())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    small_gguf.library_tokenizer().save(str(folder / "tokenizer.json"))
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"eos_token_id": 2})
    write(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    return folder


def write(path, content):
    path.write_text(json.dumps(content))


def test_what_belongs_to_a_model_comes_with_it(folder):
    model, tokenizer, start, ends, special, template = pretrained.load(str(folder))
    ids = np.arange(20)
    np.testing.assert_allclose(model.forward(ids), small_gguf.small_model().forward(ids), rtol=1e-5, atol=1e-5)
    assert tokenizer.encode("<|im_start|>in the").tolist()[0] == 1 and tokenizer.vocab_size == 264
    assert start == () and ends == {2} and template == small_gguf.TEMPLATE
    assert special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_a_model_saved_here_is_one_like_any_other_once_a_tokenizer_lies_beside_it(folder, tmp_path):
    model, tokenizer, *_ = pretrained.load(str(folder))
    huggingface.save(tmp_path / "saved", model)
    with pytest.raises(CheckpointError, match="json doesn't exist: sample and chat need it"):
        pretrained.load(str(tmp_path / "saved"))
    shutil.copy(folder / "tokenizer.json", tmp_path / "saved")
    again = pretrained.load(str(tmp_path / "saved"))
    assert again.tokenizer.fingerprint == tokenizer.fingerprint
    assert np.array_equal(again.model.forward(np.arange(9)), model.forward(np.arange(9)))


def test_each_file_may_be_missing_and_the_more_special_one_counts(folder):
    (folder / "tokenizer_config.json").unlink()
    assert pretrained.load(str(folder))[-2:] == ({}, None)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}"}]
    write(folder / "tokenizer_config.json", {"chat_template": templates})
    assert pretrained.load(str(folder)).chat_template == "{{ bos_token }}"
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert pretrained.load(str(folder)).chat_template == "{{ 1 }}"
    for ids, ends in ((0, {0}), ([0, 2], {0, 2}), (None, set())):
        write(folder / "generation_config.json", {"eos_token_id": ids})
        assert pretrained.load(str(folder)).ends == ends
    write(folder / "generation_config.json", {})
    assert pretrained.load(str(folder)).ends == {2}


def test_a_text_begins_with_what_the_tokenizer_puts_there(folder):
    small_gguf.library_tokenizer("<|im_start|>").save(str(folder / "tokenizer.json"))
    loaded = pretrained.load(str(folder))
    assert loaded.start == (1,) and 1 not in loaded.tokenizer.encode("Hello")
    result = run("sample.py", "--model", folder, "--prompt", "Hello", "--temperature", 0, "--length", 8)
    ids = np.array([1, *loaded.tokenizer.encode("Hello")])
    text = loaded.tokenizer.decode(list(generate(loaded.model, ids, 8, temperature=0, stop=loaded.ends)))
    assert (result.returncode, result.stdout) == (0, f"Hello{text}\n")


def test_a_tokenizer_of_the_first_versions_does_not_name_its_kind(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["model"]["type"]
    write(folder / "tokenizer.json", content)
    assert pretrained.load(str(folder)).tokenizer.encode("the").size == 1


def test_it_chats(folder):
    pytest.importorskip("jinja2")
    loaded = pretrained.load(str(folder))
    answer = "".join(Conversation(loaded, temperature=0).answer("Hi", 5))
    result = run("chat.py", "--model", folder, "--temperature", 0, "--length", 5, input="Hi\n")
    assert (result.returncode, result.stdout) == (0, f"{answer}\n")


def test_it_is_trained_on_and_handed_back(folder, text, tmp_path):
    out = tmp_path / "out"
    flags = ["--steps", 2, "--context-length", 8, "--sample-length", 0, "--eval-tokens", 50]
    result = run("train_shakespeare.py", "--init", folder, "--corpus", text, "--out", out, *flags)
    assert result.returncode == 0, result.stderr
    tuned = checkpoint.find(out)
    again = pretrained.load(str(tuned))
    assert np.array_equal(pretrained.load(str(out)).model.flat.value, again.model.flat.value)
    assert np.array_equal(again.model.flat.value, checkpoint.load(out)[0].flat.value)
    assert again.tokenizer == pretrained.load(str(folder)).tokenizer


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("tokenizer.json", None, CheckpointError, "tokenizer.json doesn't exist: sample and chat need it"),
        ("config.json", None, CheckpointError, "config.json doesn't exist: give the folder of a Hugging Face model"),
        ("model.safetensors", None, CheckpointError, "model.safetensors doesn't exist, nor does"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, DataError, "a tokenizer of kind 'Unigram'"),
        ("tokenizer.json", [], DataError, "tokenizer.json is not a tokenizer"),
        ("generation_config.json", [2], CheckpointError, "generation_config.json can't be read: it holds no JSON obj"),
        ("generation_config.json", {"eos_token_id": [2, 999]}, CheckpointError, "eos_token_id holds 999"),
        ("generation_config.json", {"eos_token_id": "2"}, CheckpointError, "eos_token_id holds '2'"),
        ("tokenizer_config.json", 5, CheckpointError, "tokenizer_config.json can't be read"),
    ],
)
def test_what_is_missing_or_damaged_is_named(folder, name, content, kind, said):
    if content is None:
        (folder / name).unlink()
    else:
        write(folder / name, content)
    with pytest.raises(kind) as raised:
        pretrained.load(str(folder))
    assert said in str(raised.value) and str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("script", ["sample.py", "chat.py"])
def test_a_folder_without_a_tokenizer_is_one_line(folder, script):
    (folder / "tokenizer.json").unlink()
    result = run(script, "--model", folder, input="")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ") and "tokenizer.json doesn't exist" in result.stderr


def test_a_folder_that_transformers_has_saved(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.generation_config.eos_token_id = [0, 2]
    theirs.save_pretrained(tmp_path)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=small_gguf.library_tokenizer("<|im_start|>"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    wrapped.chat_template = small_gguf.TEMPLATE
    wrapped.save_pretrained(tmp_path)
    loaded = pretrained.load(str(tmp_path))
    assert loaded.ends == {0, 2} and loaded.chat_template == small_gguf.TEMPLATE
    assert loaded.special.items() >= {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}.items()
    text = "the inn at 12 é<|im_end|>"
    ids = [*loaded.start, *loaded.tokenizer.encode(text).tolist()]
    assert [*ids, 2] == wrapped(text)["input_ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(loaded.model.forward(np.array(ids)), expected, rtol=1e-4, atol=1e-4)
