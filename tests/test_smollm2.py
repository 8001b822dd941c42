"""SmolLM2-135M-Instruct, from its package: transformers, with a reader of its own, computes and writes the same."""

import numpy as np
import pytest

from numpygpt import pretrained
from numpygpt.chat import Conversation
from numpygpt.sample import generate_batch

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
try:
    FILE = pretrained.packaged("smollm2")
except ImportError as without:
    pytest.skip(str(without), allow_module_level=True)

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "To be, or not to be,",
    "Water boils at",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "The three laws of motion are",
    "Ingredients:\n",
]
TEXT = """\
A gradient is a promise about the small. It says what a sum would do if one of its terms moved by so little that nothing
else noticed, and it says so for all of them at once. In 1847 Cauchy used it to walk downhill; in 1986 it was carried
back through layers of little sums, each of which knew only its own two lines of algebra. Nobody in the chain sees the
whole. The last one is told how wrong it was, and hands that on, multiplied by what it did itself, and so to the first.
A mistake in one of the hands is not loud: the walk still goes down, only slower, or beside the path, and 3 of 4 people
who look at the curve say that it needs a larger step. This is why one measures, with a real difference, in 64 bits.
So take the layer away, and put it back; count what is left over, and write it down.
"""


@pytest.fixture(scope="module")
def ours():
    return pretrained.load("smollm2")


@pytest.fixture(scope="module")
def theirs():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = {"gguf_file": FILE.name, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(FILE.parent, **options).eval()


def test_logits_are_those_of_transformers_at_every_position(ours, theirs):
    import torch

    ids = ours.tokenizer.encode(TEXT)[:200].astype(np.int64)
    assert len(ids) == 200
    with torch.no_grad():
        expected = theirs(torch.tensor(ids[None])).logits[0].numpy()
    logits = ours.model.forward(ids)
    assert (np.abs(logits - expected).max(axis=-1) < 1e-5 * np.abs(expected).max()).all()
    assert (logits.argmax(axis=-1) == expected.argmax(axis=-1)).all()


def test_greedy_continuations_are_those_of_transformers(ours, theirs):
    """Theirs takes each of our tokens too, given those before it: then theirs, going on alone, takes all of them."""
    import torch

    prompts = [ours.tokenizer.encode(prompt) for prompt in PROMPTS]
    steps = list(generate_batch(ours.model, prompts, 50, temperature=0))
    for i, prompt in enumerate(prompts):
        ids = [*prompt.tolist(), *(step[i].token for step in steps)]
        with torch.no_grad():
            choices = theirs(torch.tensor([ids[:-1]])).logits[0].argmax(dim=-1)
        assert i or ours.tokenizer.decode(ids[len(prompt) :]).startswith(" Paris.")
        assert ids[len(prompt) :] == choices[len(prompt) - 1 :].tolist(), PROMPTS[i]


def test_it_knows_two_capitals_and_what_was_said(ours):
    pytest.importorskip("jinja2")
    talk = Conversation(ours, temperature=0)
    assert "Paris" in "".join(talk.answer("What is the capital of France?", 20))
    assert "Rome" in "".join(talk.answer("And of Italy?", 20))
