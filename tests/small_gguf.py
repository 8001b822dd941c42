"""A small random model with its tokenizer, and a GGUF file of it, written by llama.cpp's own package."""

import numpy as np

from numpygpt.config import TransformerConfig
from numpygpt.model import TransformerLM

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a"]


def vocabulary():
    """Three special tokens, one for each byte, and one for each merge."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def small_model(tied=False, seed=0):
    config = TransformerConfig(
        vocab_size=len(vocabulary()),
        context_length=64,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        d_ff=64,
        rope_theta=500.0,
        norm_eps=1e-3,
        tie_embeddings=tied,
    )
    model = TransformerLM(config, rng=seed).eval()
    rng = np.random.default_rng(seed)
    for p in model.parameters():
        p.value = p.value + rng.normal(0, 0.1, p.shape).astype(np.float32)
    return model


def names(config):
    """Our names of the tensors, and GGUF's."""
    ours = {"token_embeddings": "token_embd", "ln_final": "output_norm"}
    if not config.tie_embeddings:
        ours["lm_head"] = "output"
    parts = {"ln1": "attn_norm", "attn.q_proj": "attn_q", "attn.k_proj": "attn_k", "attn.v_proj": "attn_v"}
    parts |= {"attn.output_proj": "attn_output", "ln2": "ffn_norm"}
    parts |= {"ffn.w1": "ffn_gate", "ffn.w2": "ffn_down", "ffn.w3": "ffn_up"}
    for layer in range(config.num_layers):
        ours |= {f"layers.{layer}.{part}": f"blk.{layer}.{theirs}" for part, theirs in parts.items()}
    return {f"{our}.weight": f"{theirs}.weight" for our, theirs in ours.items()}


def write(path, model, kind="F32", pre="smollm", architecture="llama", change=lambda writer: None, without=()):
    """Write a model's matrices in a kind of GGMLQuantizationType, its gains in float32; `change` adds to the writer."""
    import gguf

    config, tokens = model.config, vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.d_model // config.num_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    theirs = names(config)
    for name, p in model.named_parameters():
        if name in without:
            continue
        wanted = gguf.GGMLQuantizationType[kind if p.decays else "F32"]
        writer.add_tensor(theirs[name], gguf.quants.quantize(p.value, wanted), raw_dtype=wanted)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def library_tokenizer(begin=""):
    """Return the small model's tokenizer, of the library.

    `begin` is a token that its processor puts before a text, and "<|im_end|>" behind it.
    """
    import tokenizers

    table = {token: index for index, token in enumerate(vocabulary())}
    merges = [tuple(merge.split()) for merge in MERGES]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(table, merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    if begin:
        special = [(token, library.token_to_id(token)) for token in (begin, "<|im_end|>")]
        template = tokenizers.processors.TemplateProcessing(single=f"{begin} $A <|im_end|>", special_tokens=special)
        library.post_processor = template
    return library
