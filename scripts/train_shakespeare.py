"""Train a character-level Transformer on Shakespeare, in plain NumPy, and let it write.

With no arguments: 2,000 steps of a small model on Shakespeare's plays, saved under runs/shakespeare.
"""

import argparse
from pathlib import Path

import numpy as np

from numpygpt import checkpoint
from numpygpt.array import check_not_negative
from numpygpt.cli import fail, run
from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.corpus import load_corpus
from numpygpt.data import CharTokenizer, split
from numpygpt.model import TransformerLM
from numpygpt.sample import generate
from numpygpt.train import TrainConfig, Trainer


def parse_arguments() -> argparse.Namespace:
    """Declare and read the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--corpus", default="plays", help='"plays" (38 plays), "tiny" (tiny Shakespeare), or a UTF-8 text file')
    add(
        "--out",
        type=Path,
        default=Path("runs/shakespeare"),
        help="folder for the trained model; one that is there is replaced",
    )

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=TrainConfig.steps, help="number of updates; the schedule is fitted to it")
    add("--batch-size", type=int, default=TrainConfig.batch_size, help="sequences in a batch")
    add("--lr", type=float, default=TrainConfig.lr, help="learning rate at the peak")
    add("--min-lr", type=float, help="learning rate at the end (unless given: a tenth of --lr)")
    add(
        "--warmup-steps",
        type=int,
        help="steps of rising learning rate (unless given: 100, or a tenth of a shorter run)",
    )
    add("--weight-decay", type=float, default=TrainConfig.weight_decay, help="AdamW's decay, on matrices only")
    add("--beta1", type=float, default=TrainConfig.beta1, help="decay of AdamW's first moment")
    add("--beta2", type=float, default=TrainConfig.beta2, help="decay of AdamW's second moment")
    add("--grad-clip", type=float, default=TrainConfig.grad_clip, help="largest norm of the gradient")
    add(
        "--eval-interval",
        type=int,
        default=TrainConfig.eval_interval,
        help="steps between evaluations on the held-out tenth",
    )
    add("--seed", type=int, default=TrainConfig.seed, help="of starting weights, batches, dropout and sample")
    add("--sample-length", type=int, default=500, help="characters to write at the end")

    add = parser.add_argument_group("model").add_argument
    add("--context-length", type=int, default=64, help="characters the model sees")
    add("--d-model", type=int, default=128, help="features of the residual stream")
    add("--num-layers", type=int, default=4, help="decoder blocks")
    add("--num-heads", type=int, default=4, help="attention heads")
    add("--num-kv-heads", type=int, help="key/value heads (unless given: as many as --num-heads)")
    add("--d-ff", type=int, help="hidden features of the ffn (unless given: 4, or 8/3 if gated, times --d-model)")
    add("--norm", choices=CHOICES["norm"], default=TransformerConfig.norm, help="kind of norm")
    add(
        "--norm-position",
        choices=CHOICES["norm_position"],
        default=TransformerConfig.norm_position,
        help="before or after the sublayer",
    )
    add("--norm-eps", type=float, default=TransformerConfig.norm_eps, help="added to the mean square or variance")
    add("--ffn", choices=CHOICES["ffn"], default=TransformerConfig.ffn, help="kind of feed-forward layer")
    add(
        "--positions",
        choices=CHOICES["positions"],
        default=TransformerConfig.positions,
        help="how the model knows the order",
    )
    add("--rope-theta", type=float, default=TransformerConfig.rope_theta, help="base of RoPE's frequencies")
    add(
        "--rope-layout",
        choices=CHOICES["rope_layout"],
        default=TransformerConfig.rope_layout,
        help="which features RoPE pairs",
    )
    add(
        "--bias",
        action=argparse.BooleanOptionalAction,
        default=TransformerConfig.bias,
        help="biases of linear maps and LayerNorm",
    )
    add(
        "--tie-embeddings",
        action=argparse.BooleanOptionalAction,
        default=TransformerConfig.tie_embeddings,
        help="one array for both ends",
    )
    add("--dropout", type=float, default=TransformerConfig.dropout, help="probability of dropping a feature")
    add("--init", choices=CHOICES["init"], default=TransformerConfig.init, help="starting weights")
    return parser.parse_args()


def main() -> int:
    """Train, report, save and sample; return the exit status."""
    args = parse_arguments()
    flags = vars(args)
    try:
        train_config = TrainConfig(**{k: v for k, v in flags.items() if k in TrainConfig.__dataclass_fields__})
        check_not_negative(sample_length=args.sample_length)
        text = load_corpus(args.corpus)
        tokenizer = CharTokenizer.train(text)
        model_flags = {k: v for k, v in flags.items() if k in TransformerConfig.__dataclass_fields__}
        config = TransformerConfig(vocab_size=tokenizer.vocab_size, **model_flags)
        tokens = tokenizer.encode(text)
        train_tokens, validation_tokens = split(tokens, config.context_length)
        init_rng, sample_rng = np.random.default_rng(args.seed).spawn(2)
        model = TransformerLM(config, rng=init_rng)
        trainer = Trainer(model, train_tokens, validation_tokens, train_config)
        checkpoint.check_writable(args.out)
    except (ValueError, OSError) as error:
        fail(error)
    except MemoryError as error:
        fail(f"the model doesn't fit into memory ({error}): make it smaller")

    saved_at = None

    def save(validation_loss: float | None) -> None:
        nonlocal saved_at
        state = {"step": trainer.step, "validation_loss": validation_loss, "tokenizer": tokenizer.fingerprint}
        checkpoint.save(args.out, model, state)
        tokenizer.save(args.out)
        saved_at = trainer.step

    print(f"corpus: {args.corpus}, {len(tokens):,} characters, {tokenizer.vocab_size} different ones")
    print(f"model: {model.flat.value.size:,} parameters", flush=True)
    try:
        validation_loss = trainer.run(after_evaluation=save)
        if validation_loss is None:
            save(None)
            print(f"Stopped after step {trainer.step} of {args.steps}; saved in {args.out}")
            return 130
    except BrokenPipeError:  # nobody reads what is printed any more
        save(None)
        raise
    except (FloatingPointError, MemoryError, OSError) as error:
        kept = "nothing was saved" if saved_at is None else f"the model of step {saved_at} is in {args.out}"
        remedy = "try a smaller --lr; " if isinstance(error, FloatingPointError) else ""
        fail(f"stopped after step {trainer.step}: {error}; {remedy}{kept}", 1)

    print(f"validation loss: {validation_loss:.4f}")
    print(f"Saved in {args.out}; a sample:\n")
    prompt = "\n" if "\n" in tokenizer.vocabulary else text[0]
    for token in generate(model, tokenizer.encode(prompt), args.sample_length, temperature=0.8, rng=sample_rng):
        print(tokenizer.decode([token]), end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run(main)
