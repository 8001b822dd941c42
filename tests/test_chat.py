"""A conversation: answers are what the model says to the whole text, of which nothing is read twice."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import small_gguf
from running import run

from numpygpt.chat import ContextFull, Conversation, render
from numpygpt.model import TransformerLM
from numpygpt.pretrained import Pretrained
from numpygpt.sample import generate
from numpygpt.tokenizer import BPETokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture
def loaded():
    """A random model that seldom ends an answer, with ChatML as its template."""
    special = {"eos_token": "<|im_end|>"}
    return Pretrained(
        small_gguf.small_model(),
        BPETokenizer(small_gguf.library_tokenizer()),
        (),
        frozenset({2}),
        special,
        small_gguf.TEMPLATE,
    )


def with_context(loaded, length):
    """The same with another context length."""
    model = TransformerLM(dataclasses.replace(loaded.model.config, context_length=length), rng=0).eval()
    model.load_state_dict(loaded.model.state_dict())
    return loaded._replace(model=model)


def expected(loaded, messages, length):
    """The greedy answer to messages, by reading all of them anew."""
    ids = loaded.tokenizer.encode(render(loaded.chat_template, messages))
    return loaded.tokenizer.decode(list(generate(loaded.model, ids, length, temperature=0, stop=loaded.ends)))


def test_answers_are_those_to_the_whole_conversation_and_only_what_is_new_is_read(loaded, monkeypatch):
    loaded = with_context(loaded, 300)
    talk = Conversation(loaded, "Be kind.", temperature=0)
    messages, read = [{"role": "system", "content": "Be kind."}], []
    answers = {}
    for question in ("Hello", "the inn", "9"):
        messages.append({"role": "user", "content": question})
        answers[question] = expected(loaded, messages, 12)
        messages.append({"role": "assistant", "content": answers[question]})
    forward = loaded.model.forward
    monkeypatch.setattr(loaded.model, "forward", lambda ids, *rest: read.append(ids.shape[-1]) or forward(ids, *rest))
    for question, answer in answers.items():
        assert "".join(talk.answer(question, 12)) == answer
    assert talk.messages == messages
    whole = loaded.tokenizer.encode(render(loaded.chat_template, messages))
    assert sum(read) < len(whole) + 12  # a drawn answer may be encoded otherwise when it is read again


def test_an_answer_that_was_stopped_belongs_to_the_conversation(loaded):
    loaded = with_context(loaded, 200)
    talk = Conversation(loaded, temperature=0)
    with contextlib.closing(talk.answer("Hello", 30)) as pieces:
        heard = "".join(itertools.islice(pieces, 3))
    assert talk.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": heard}]
    question = {"role": "user", "content": "on"}
    assert "".join(talk.answer("on", 10)) == expected(loaded, [*talk.messages[:2], question], 10)


def test_an_interruption_inside_the_model_leaves_the_cache_right(loaded, monkeypatch):
    loaded = with_context(loaded, 200)
    talk = Conversation(loaded, temperature=0)
    last = loaded.model.layers[-1]
    forward, calls = last.forward, iter([False, False, True])

    def interrupted(*arguments, **options):
        if next(calls, False):
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(last, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(talk.answer("Hello", 30))
    question = {"role": "user", "content": "on"}
    assert "".join(talk.answer("on", 10)) == expected(loaded, [*talk.messages[:2], question], 10)


def test_a_long_text_is_read_in_chunks_with_the_same_answer(loaded, monkeypatch):
    loaded = with_context(loaded, 200)
    monkeypatch.setattr("numpygpt.chat.CHUNK", 7)
    answer = "".join(Conversation(loaded, temperature=0).answer("Hello " * 5, 10))
    assert answer == expected(loaded, [{"role": "user", "content": "Hello " * 5}], 10)


def test_the_model_ends_an_answer(loaded):
    talk = Conversation(loaded._replace(ends=frozenset(range(264))), temperature=0)
    assert list(talk.answer("Hello")) == []
    assert talk.messages[1:] == [{"role": "assistant", "content": ""}]


def test_a_full_context_is_named(loaded):
    talk = Conversation(loaded, temperature=0)  # 64 tokens
    with pytest.raises(ContextFull, match="has 71 tokens, and the model sees 64"):
        list(talk.answer("x" * 52))
    assert talk.messages == []
    heard = []
    with pytest.raises(ContextFull, match="65 tokens"):
        heard += talk.answer("x" * 10)
    assert talk.messages[0]["content"] == "x" * 10 and talk.messages[1]["content"]
    with pytest.raises(ContextFull):
        list(talk.answer("y"))
    assert len(talk.messages) == 2


def test_the_same_seed_gives_the_same_answer(loaded):
    first, second, other = (
        "".join(Conversation(loaded, rng=seed, temperature=1.0).answer("Hello", 20)) for seed in (1, 1, 2)
    )
    assert first == second != other


def test_ids_that_a_text_begins_with_come_once(loaded):
    asked = [{"role": "user", "content": "Hi"}]
    plain = Conversation(loaded, temperature=0)._encode(asked)
    assert plain[0] == 1
    assert Conversation(loaded._replace(start=(1,)), temperature=0)._encode(asked) == plain
    assert Conversation(loaded._replace(start=(0,)), temperature=0)._encode(asked) == [0, *plain]


def test_a_template_may_name_special_tokens_and_refuse(loaded):
    template = "{{ eos_token }}{{ messages[0].content }}"
    assert Conversation(loaded._replace(chat_template=template))._encode([{"content": "a"}])[0] == 2
    for template, reason in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
    ):
        with pytest.raises(ValueError, match=f"chat template can't take this conversation: .*{reason}"):
            list(Conversation(loaded._replace(chat_template=template)).answer("Hi"))


def test_what_makes_no_sense_is_named_at_once(loaded):
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(loaded._replace(chat_template=None))
    with pytest.raises(ValueError, match="temperature"):
        Conversation(loaded, temperature=-1)


@pytest.fixture
def file(tmp_path, loaded):
    pytest.importorskip("gguf")
    return small_gguf.write(tmp_path / "small.gguf", loaded.model, pre="gpt-2")


def test_the_script_answers_each_line_and_goes_on_when_the_context_is_full(file, loaded):
    asked = f"\nHi\n{'x' * 60}\n/new\nHi\n"
    result = run("chat.py", "--model", file, "--temperature", 0, "--length", 5, input=asked)
    answer = expected(loaded, [{"role": "user", "content": "Hi"}], 5)
    assert result.stdout == f"{answer}\n{answer}\n"
    assert result.returncode == 1
    assert result.stderr.startswith("error: the conversation has ") and result.stderr.endswith("a new one with /new\n")
    assert result.stderr.count("\n") == 1


def test_a_text_goes_on_by_the_model_of_a_file(file, loaded):
    result = run("sample.py", "--model", file, "--prompt", "the inn", "--temperature", 0, "--length", 8)
    ids = np.array(loaded.tokenizer.encode("the inn"))
    text = loaded.tokenizer.decode(list(generate(loaded.model, ids, 8, temperature=0, stop=loaded.ends)))
    assert (result.returncode, result.stdout) == (0, f"the inn{text}\n")


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("chat.py", ["--model", "nobody"], "a GGUF file or a Hugging Face folder, not 'nobody'"),
        ("chat.py", ["--model", "missing.gguf"], "missing.gguf"),
        ("sample.py", [], "give the folder of a trained model, or --model"),
        ("sample.py", ["runs", "--model", "smollm2"], "give the folder of a trained model, or --model"),
    ],
)
def test_a_mistake_is_one_line(script, flags, message):
    result = run(script, *flags, input="")
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
