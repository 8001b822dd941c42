"""The flags of a training run, and which of them were given."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpygpt.cli import Parser, add_device, fail
from numpygpt.config import CHOICES, TransformerConfig
from numpygpt.precision import DTYPES
from numpygpt.train import TrainConfig

# What holds unless it is given: for a new model, for a trained one, and for adapters of that. The sizes are for a model
# of 135 million weights in a few GiB. Of the rates tried on it (3e-5 to 3e-4, 1e-3 to 5e-3 with adapters of rank 8),
# those near these lowered the held-out loss most.
NEW = {"batch_size": TrainConfig.batch_size, "context_length": 64, "lr": TrainConfig.lr, "eval_tokens": None}
TRAINED = {"batch_size": 4, "context_length": 256, "lr": 1e-4, "eval_tokens": 8192}
LORA = {"lr": 2e-3}

# What --recipe names: values of flags that hold unless they are given. fast comes to a loss of 1.87 on tiny Shakespeare
# in little time. Less momentum and a long warm-up helped, a lower end of the rate did not. A batch of 12 needs 430
# steps, and a tenth more time; with one of 20, 250 steps take as long and don't get there.
RECIPES: dict[str, dict[str, Any]] = {
    "fast": {
        "steps": 320,
        "batch_size": 16,
        "lr": 4e-3,
        "warmup_steps": 100,
        "beta1": 0.8,
        "eval_interval": 320,
        "sample_length": 100,
    },
}


def make_parser(description: str) -> Parser:
    """Declare the flags; `description` is what --help says first."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--corpus",
        default="plays",
        help='"plays" (38 plays), "tiny" (tiny Shakespeare), a UTF-8 text file, a folder of *.txt',
    )
    add("--tokenizer", choices=("char", "bpe"), default="char", help="what a token is: a character, or merged bytes")
    add("--vocab-size", type=int, help="tokens of --tokenizer bpe, at most (unless given: 512)")
    add(
        "--out",
        type=Path,
        default=Path("runs/shakespeare"),
        help="folder of the run; one that holds a run already is refused, unless --resume is given",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the run under --out, with its flags, as if it had never stopped",
    )
    add("--config", type=Path, metavar="FILE", help="take the flags that aren't given from a run's config.json")
    recipes = "; ".join(f"{name} is {' '.join(words(flags))}" for name, flags in RECIPES.items())
    add("--recipe", choices=RECIPES, help=f"take the flags that aren't given from a recipe: {recipes}")
    add("--keep", type=int, default=3, help="checkpoints to keep: the newest so many, and the best")

    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--steps", type=int, default=TrainConfig.steps, help="number of updates; the schedule is fitted to it")
    add("--minutes", type=float, default=math.inf, help="stop after this time, if the steps take longer")
    add("--batch-size", type=int, help=f"sequences in a batch {unless_given('batch_size')}")
    add("--accumulate", type=int, default=TrainConfig.accumulate, help="parts a batch is cut into, to save memory")
    add_device(group)
    add("--threads", type=int, help="threads that share each batch on the CPU (unless given: one for each usable core)")
    add(
        "--dtype",
        choices=DTYPES,
        default=TrainConfig.dtype,
        help="of matrix products, with all else in float32; float16 is made for GPUs, and slower on a CPU",
    )
    add("--lr", type=float, help=f"learning rate at the peak {unless_given('lr')}")
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
    add("--eval-tokens", type=int, help=f"held-out tokens to evaluate on {unless_given('eval_tokens')}")
    add("--seed", type=int, default=TrainConfig.seed, help="of starting weights, batches, dropout and sample")
    add("--sample-length", type=int, default=500, help="tokens to write at the end")

    add = parser.add_argument_group(
        "model",
        "With --init MODEL it is a trained one, of which all but --context-length, --lora and --lora-alpha is settled.",
    ).add_argument
    add(
        "--init",
        default=TransformerConfig.init,
        help='starting weights: drawn ("glorot" or "gpt2"), or those of a trained model: a run or checkpoint of ours, '
        '"smollm2", a GGUF file or a Hugging Face folder',
    )
    add("--lora", type=int, metavar="RANK", help="freeze the model of --init; adapters of this rank learn beside it")
    add("--lora-alpha", type=float, default=16.0, help="what the adapters add is multiplied by this over their rank")
    add(
        "--context-length",
        type=int,
        help=f"tokens the model sees; of a trained one, while it learns {unless_given('context_length')}",
    )
    add_parts(add)
    add("--d-ff", type=int, help="hidden features of the ffn (unless given: 4, or 8/3 if gated, times --d-model)")
    return parser


def add_parts(add: Callable[..., Any]) -> None:
    """Add the flags of the config that say what a new model is made of; `add` is a parser's add_argument."""
    add("--d-model", type=int, default=128, help="features of the residual stream")
    add("--num-layers", type=int, default=4, help="decoder blocks")
    add("--num-heads", type=int, default=4, help="attention heads")
    add("--num-kv-heads", type=int, help="key/value heads (unless given: as many as --num-heads)")
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


def unless_given(name: str) -> str:
    """Return the words that say what holds unless a flag is given."""
    new, trained = ("all" if values[name] is None else values[name] for values in (NEW, TRAINED))
    adapted = f", {LORA[name]} with --lora" if name in LORA else ""
    return f"(unless given: {new}; {trained} for a trained model{adapted})"


def parse_arguments(parser: Parser) -> argparse.Namespace:
    """Read the flags; those that aren't given come from the file of --config, if that is, and else from the recipe."""
    args = parser.parse_args()
    if args.config is None:
        return with_recipe(parser, args.recipe, {})
    if args.resume:
        fail("--resume goes on with the flags of the run itself: leave out --config")
    if args.recipe is not None:
        fail("--recipe and --config both give the flags that aren't given: leave out one of them")
    try:
        flags = json.loads(args.config.read_text(encoding="utf-8"))
        flags.pop("versions", None)
        if unknown := sorted(flags.keys() - vars(args).keys() | flags.keys() & {"config", "resume"}):
            raise ValueError(f"there is no flag {', '.join(unknown)} for it to hold")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        fail(f"--config {args.config} is no config.json of a run: {error}")
    parser.source = f"--config {args.config}: "
    values = vars(parser.parse_args(words(flags)))
    parser.source = ""
    return with_recipe(parser, values["recipe"], {name: values[name] for name in flags})


def with_recipe(parser: Parser, recipe: str | None, values: dict[str, Any]) -> argparse.Namespace:
    """Return the flags of the command line; those that aren't given have these values, or else the recipe's."""
    parser.set_defaults(**RECIPES.get(recipe or "", {}) | values)
    return parser.parse_args()


def words(flags: dict[str, Any]) -> list[str]:
    """Return flags as a command line has them, so that their values are checked as its are; None isn't given."""
    result = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            result.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            result.append(f"--{flag}={value}")
    return result


def given_flags(parser: Parser) -> set[str]:
    """Return the names of the flags on the command line, whether or not they say what would hold without them."""
    unset = object()
    namespace = argparse.Namespace(**{name: unset for name in vars(parser.parse_args())})
    return {name for name, value in vars(parser.parse_args(namespace=namespace)).items() if value is not unset}
