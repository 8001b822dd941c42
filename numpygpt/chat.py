"""Conversations: a model's own template makes one text of all messages, and the model goes on from it.

The text grows from turn to turn, and so does the key/value cache: of each new text only what lies behind the part that
it shares with what was read before is read.
"""

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from numpygpt.device import mover
from numpygpt.extras import need
from numpygpt.init import Seed
from numpygpt.module import evaluating
from numpygpt.pretrained import Pretrained
from numpygpt.sample import next_token_distribution

CHUNK = 256  # ids read in one pass: logits of a whole conversation would take more memory than the model

Messages = list[dict[str, str]]  # each with its "role", one of system, user and assistant, and "content"


class ContextFull(ValueError):
    """A conversation that has no room for another token."""


def render(template: str, messages: Messages, **variables: str) -> str:
    """Return the text that a chat template makes of messages, up to where the answer begins.

    A template is a program of whoever made the model: it runs in Jinja's sandbox, where it can do no more than put
    together text. ValueError if it refuses the messages.
    """
    jinja2 = need("jinja2", "gguf")
    sandbox = need("jinja2.sandbox", "gguf")

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **variables)
    except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the model's chat template can't take this conversation: {error}") from error


class Conversation:
    """A conversation with a model, of the `messages` so far.

    `limits` are next_token_distribution's. ValueError for one that makes no sense, and for a model without a chat
    template.
    """

    def __init__(self, pretrained: Pretrained, system: str | None = None, *, rng: Seed = None, **limits: Any):
        if pretrained.chat_template is None:
            raise ValueError("this model has no chat template: it goes on from a text, but can't hold a conversation")
        next_token_distribution(np.zeros(1), **limits)
        self.messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        self._template = pretrained.chat_template
        self._pretrained, self._limits, self._rng = pretrained, limits, np.random.default_rng(rng)
        self._modules, self._cache = list(pretrained.model.modules()), pretrained.model.new_cache(1)
        self._read: list[int] = []  # ids whose keys and values are in the cache

    def answer(self, question: str, max_new_tokens: int | None = None) -> Generator[str, None, None]:
        """Yield the model's answer in pieces, each a character or more, as soon as they are known.

        It ends with the model's own end of a turn, or after so many tokens. However it ends, also when it isn't read to
        its end, the question and what was answered then belong to the conversation. ContextFull if there is no room
        (left) for an answer; then, and for a question that can't be encoded, a question that has no answer yet doesn't.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = self._encode(messages)
        self._check_room(len(ids))
        self.messages, pieces = messages, list[str]()
        try:
            for piece in self._pretrained.tokenizer.stream(self._draw(ids, max_new_tokens)):
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _encode(self, messages: Messages) -> list[int]:
        start = self._pretrained.start
        text = render(self._template, messages, **self._pretrained.special)
        ids = self._pretrained.tokenizer.encode(text).tolist()
        return ids if tuple(ids[: len(start)]) == start else [*start, *ids]

    def _check_room(self, length: int) -> None:
        context = self._pretrained.model.config.context_length
        if length > context:
            raise ContextFull(f"the conversation has {length} tokens, and the model sees {context}: begin a new one")

    def _draw(self, ids: list[int], max_new_tokens: int | None) -> Iterator[int]:
        """Yield the tokens of an answer to a conversation."""
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids[:-1], self._read, strict=False))
        del self._read[len(list(shared)) :]
        new = ids[len(self._read) :]
        for _ in itertools.count() if max_new_tokens is None else range(max_new_tokens):
            self._check_room(len(self._read) + len(new))
            logits = self._forward(new)[: self._pretrained.tokenizer.vocab_size]
            probs = next_token_distribution(logits, **self._limits)
            token = int(self._rng.choice(probs.size, p=probs))
            if token in self._pretrained.ends:
                return
            yield token
            new = [token]

    def _forward(self, ids: list[int]) -> np.ndarray:
        """Read ids behind those that were read; return the logits (V,) behind the last one."""
        model = self._pretrained.model
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            positions = np.arange(len(self._read), len(self._read) + len(chunk))
            with evaluating(self._modules):
                inputs = np.asarray(np.array([chunk]), like=model.flat.value)
                logits = model.forward(inputs, positions, self._cache)
            self._read += chunk
        return mover("cpu")(logits[0, -1])
