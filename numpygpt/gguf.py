"""GGUF, llama.cpp's format: one file holds a model's shape, its tokenizer and its weights, often in a few bits each.

    magic, version, number of tensors, number of settings
    settings: key, kind, value            "llama.block_count" is 30, "tokenizer.ggml.tokens" a list of strings
    tensors: name, sizes, kind, offset    "blk.0.attn_q.weight"; its fastest axis comes first
    the bytes of the tensors

Source: the specification in ggml's repository, docs/gguf.md. The package gguf makes float32 of quantised blocks. The
header is read here, as that package takes four seconds for the 100,000 strings of a vocabulary.

**Rows of q and k.** llama.cpp's converter permutes the rows of Hugging Face's checkpoints, in which features
(i, i + d_k/2) of a head are a pair: here neighbours are, (2i, 2i + 1). That is `rope_layout="interleaved"`, so the rows
stay as they are.
"""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from numpygpt.config import TransformerConfig
from numpygpt.extras import need
from numpygpt.model import TransformerLM
from numpygpt.tensorfile import CheckpointError
from numpygpt.tokenizer import BPETokenizer

ARCHITECTURE = "llama"
ALIGNMENT = 32  # bytes; a setting may change it
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as in struct
STRING, ARRAY = 8, 9
ROWS = 1024  # that the package gguf is given at a time: it needs twice the memory of what it returns
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds of tokens that are no product of merges

FIELDS = {
    "context_length": "context_length",
    "embedding_length": "d_model",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "feed_forward_length": "d_ff",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "norm_eps",
}
OPTIONAL = {"attention.head_count_kv", "rope.freq_base"}  # as many as heads; 10,000
NAMES = {
    "token_embd": "token_embeddings",
    "attn_norm": "ln1",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.output_proj",
    "ffn_norm": "ln2",
    "ffn_gate": "ffn.w1",
    "ffn_up": "ffn.w3",
    "ffn_down": "ffn.w2",
    "output_norm": "ln_final",
    "output": "lm_head",
}


class Stored(NamedTuple):
    """Where a tensor is in the file."""

    shape: tuple[int, ...]  # the fastest axis last, as in NumPy
    kind: int  # of gguf.GGMLQuantizationType
    offset: int  # of its first byte, from that of all tensors


class Header:
    """Reads what stands in a header, one after another. Raises struct.error where the file ends too soon."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def numbers(self, kind: str, count: int) -> tuple:
        """Return so many numbers of one of struct's kinds."""
        layout = f"<{count}{kind}"
        start, self.position = self.position, self.position + struct.calcsize(layout)
        return struct.unpack_from(layout, self.data, start)

    def number(self, kind: str) -> Any:
        """Return a number of one of struct's kinds."""
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        """Return a string, which has its length in front."""
        return self.numbers("s", self.number("Q"))[0].decode()

    def value(self, kind: int) -> Any:
        """Return a setting of one of the format's kinds. KeyError for an unknown one."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        return [self.value(kind) for _ in range(count)]

    def stored(self) -> Stored:
        """Return where a tensor is."""
        shape = self.numbers("Q", self.number("I"))[::-1]
        return Stored(shape, *self.numbers("I", 1), *self.numbers("Q", 1))


class GGUFFile:
    """An open file: `settings` by key, and where its `tensors` are, by name. Their bytes are mapped into memory.

    Everything here raises CheckpointError, which names the file, if that is damaged, of another kind, or asks for
    something that this engine lacks; OSError if it can't be opened.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = Header(self._data)
            magic, version = header.numbers("s", 4)[0], header.number("I")
            if magic != b"GGUF":
                raise ValueError(f"it begins with {magic!r}")
            if version not in (2, 3):
                raise ValueError(f"it has version {version}, and this program reads 2 and 3")
            tensors, settings = header.numbers("Q", 2)
            self.settings = {header.string(): header.value(header.number("I")) for _ in range(settings)}
            self.tensors = {header.string(): header.stored() for _ in range(tensors)}
            alignment = self.settings.get("general.alignment", ALIGNMENT)
            self._start = math.ceil(header.position / alignment) * alignment
        except (ValueError, KeyError, TypeError, struct.error, MemoryError, RecursionError, ArithmeticError) as error:
            raise CheckpointError(f"{self.path} is damaged or no GGUF file: {error}") from error

    def setting(self, key: str) -> Any:
        """Return a setting."""
        if key not in self.settings:
            raise CheckpointError(f"{self.path} lacks the setting {key}")
        return self.settings[key]

    def tensor(self, name: str) -> Float[np.ndarray, "..."]:
        """Return a tensor in float32."""
        gguf = need("gguf", "gguf")
        stored = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(stored.kind)
            weights, size = gguf.GGML_QUANT_SIZES[kind]  # of a block
            shape = (*stored.shape[:-1], stored.shape[-1] // weights * size)
            blocks = np.frombuffer(self._data, np.uint8, math.prod(shape), self._start + stored.offset)
            blocks, tensor = blocks.reshape(-1, shape[-1]), np.empty(stored.shape, np.float32)
            rows = tensor.reshape(len(blocks), -1)
            for start in range(0, len(rows), ROWS):
                rows[start : start + ROWS] = gguf.quants.dequantize(blocks[start : start + ROWS], kind)
            return tensor
        except (ValueError, LookupError, NotImplementedError) as error:
            raise CheckpointError(f"{self.path}: the tensor {name} is damaged or of another kind: {error}") from error

    def config(self) -> TransformerConfig:
        """Return the config. A setting of the architecture that has no counterpart here is an error that names it."""
        if (architecture := self.setting("general.architecture")) != ARCHITECTURE:
            raise CheckpointError(f"{self.path} is of architecture {architecture!r}, and this engine {ARCHITECTURE!r}")
        prefix = f"{ARCHITECTURE}."
        shape = {key.removeprefix(prefix): x for key, x in self.settings.items() if key.startswith(prefix)}
        if missing := FIELDS.keys() - shape.keys() - OPTIONAL:
            raise CheckpointError(f"{self.path} lacks the setting {prefix}{min(missing)}")
        fields = {field: shape.pop(key) for key, field in FIELDS.items() if key in shape}
        try:
            vocab_size = self.tensors["token_embd.weight"].shape[0]
            tied = "output.weight" not in self.tensors
            fields |= {"vocab_size": vocab_size, "rope_layout": "interleaved", "tie_embeddings": tied}
            config = TransformerConfig.from_dict(fields)
        except (ValueError, TypeError, LookupError) as error:
            raise CheckpointError(f"{self.path} holds no model of ours: {error}") from error
        d_k = config.d_model // config.num_heads
        implied = {
            "vocab_size": vocab_size,
            "rope.dimension_count": d_k,
            "attention.key_length": d_k,
            "attention.value_length": d_k,
            "rope.scaling.type": "none",
            "expert_count": 0,
            "expert_used_count": 0,
        }
        for key, value in shape.items():
            if key not in implied or value != implied[key]:
                raise CheckpointError(f"{self.path} asks for {prefix}{key} = {value!r}, which this engine doesn't have")
        return config

    def model(self) -> TransformerLM:
        """Return the model in evaluation mode, in float32; one tensor at a time is brought there."""
        names = {our_name(name): name for name in self.tensors}
        model = TransformerLM.blank(self.config())
        parameters = dict(model.named_parameters())
        if unknown := sorted(names[name] for name in names.keys() - parameters.keys()):
            raise CheckpointError(f"{self.path} has tensors that this engine has no place for: {', '.join(unknown)}")
        if missing := sorted(parameters.keys() - names.keys()):
            raise CheckpointError(f"{self.path} lacks the tensors of {', '.join(missing)}")
        for name, p in parameters.items():
            if (shape := self.tensors[names[name]].shape) != p.shape:
                raise CheckpointError(f"{self.path}: the tensor {names[name]} has shape {shape}, not {p.shape}")
            p.value = self.tensor(names[name])
        return model.eval()

    def tokenizer(self) -> BPETokenizer:
        """Return the tokenizer, with its special tokens. ImportError without the package tokenizers."""
        library = need("tokenizers", "gguf")
        digits = library.pre_tokenizers.Digits(individual_digits=True)
        words = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        kinds = {"gpt-2": words, "smollm": library.pre_tokenizers.Sequence([digits, words])}
        model, words_of = (self.setting(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        if model != "gpt2" or words_of not in kinds:
            raise CheckpointError(
                f"{self.path} has a tokenizer of kind {model!r} and {words_of!r}, and this program knows 'gpt2', which "
                f"is byte-level BPE, with {' and '.join(map(repr, kinds))}"
            )
        tokens, types, merges = (self.setting(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        try:
            tokenizer = library.Tokenizer(library.models.BPE(vocabulary, pairs))
        except Exception as error:  # the library raises no subclass
            raise CheckpointError(f"{self.path} has a damaged tokenizer: {error}") from error
        tokenizer.pre_tokenizer, tokenizer.decoder = kinds[words_of], library.decoders.ByteLevel()
        for token, kind in zip(tokens, types, strict=True):
            if kind in (UNKNOWN, CONTROL, USER_DEFINED):
                added = library.AddedToken(token, normalized=False, special=kind != USER_DEFINED)
                tokenizer.add_tokens([added])
        return BPETokenizer(tokenizer)


def our_name(name: str) -> str:
    """Return our name of a tensor, or its own where it has no counterpart."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in NAMES:
        return name
    return f"{f'layers.{match[1]}.' if match[1] else ''}{NAMES[match[2]]}.weight"
