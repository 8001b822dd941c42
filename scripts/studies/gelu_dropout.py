"""GELU as what dropout of a certain kind gives on average."""

import math
from typing import Any

import numpy as np

from benchmarks.report import table
from numpygpt.array import Array
from numpygpt.layers.activation import GELU, sigmoid
from numpygpt.special import normal_cdf
from studies.picture import BLUE, GREY, RED
from studies.setting import Setting
from studies.study import Study, spread
from studies.verdict import Claim, Criterion, Numbers

GRID = np.linspace(-3, 3, 24)  # without 0, where nothing can be told
DRAWS, QUICK_DRAWS = (100, 1_000, 10_000, 100_000), (100, 1_000)
CHANCE = 4.5  # deviations: one in 6,000 times the greatest of 24 is beyond
PIECE = 10_000  # draws made at once


def average_of_dropout(draws: int, rng: np.random.Generator) -> Array:
    """Return, for each x of the grid, the mean of x m: m is 1 if a standard normal number is at most x, else 0."""
    kept = np.zeros(len(GRID))
    for start in range(0, draws, PIECE):
        kept += np.sum(rng.standard_normal((min(PIECE, draws - start), len(GRID))) <= GRID, axis=0)
    return GRID * kept / draws


def measure(setting: Setting) -> Numbers:
    """Draw, more and more often, and take the distance from x Phi(x)."""
    counts = setting.pick(DRAWS, QUICK_DRAWS)
    gelu, p = GELU().forward(GRID), normal_cdf(GRID)
    deviation = np.abs(GRID) * np.sqrt(p * (1 - p))  # of one draw
    errors, from_gelu, from_sigmoid = [], [], []
    for seed in range(setting.seeds):
        rng = np.random.default_rng(seed)
        averages = [average_of_dropout(draws, rng) for draws in counts]
        errors.append([math.sqrt(np.mean((average - gelu) ** 2)) for average in averages])
        in_deviations = math.sqrt(counts[-1]) / deviation
        from_gelu.append(np.max(np.abs(averages[-1] - gelu) * in_deviations))
        from_sigmoid.append(np.max(np.abs(averages[-1] - GRID * sigmoid(1.702 * GRID)) * in_deviations))
    return {
        "setting": f"{len(GRID)} values of x, up to {counts[-1]:,} draws at each, {setting.seeds} seeds",
        "draws": counts,
        "errors": errors,
        "from_gelu": from_gelu,
        "from_sigmoid": from_sigmoid,
        "averages": average_of_dropout(counts[0], np.random.default_rng(0)),
    }


def slopes(numbers: Numbers) -> list[float]:
    """Return the power of the number of draws by which the error goes, for each seed."""
    return np.polyfit(np.log(numbers["draws"]), np.log(numbers["errors"]).T, 1)[0].tolist()


HENDRYCKS = "Hendrycks & Gimpel (2016), arXiv:1606.08415, section 2"
CLAIMS = (
    Claim(
        "The mean of x, kept with probability Phi(x) and else set to zero, is GELU(x) = x Phi(x).",
        HENDRYCKS,
        (
            Criterion(
                "greatest distance of the mean from x Phi(x), in deviations of the mean",
                lambda n: n["from_gelu"],
                high=CHANCE,
            ),
        ),
    ),
    Claim(
        "It isn't x sigmoid(1.702 x), the paper's coarse form: so many draws tell the two apart.",
        f"{HENDRYCKS}; that the trial above could have failed is shown by this one",
        (
            Criterion(
                "greatest distance of the mean from x sigmoid(1.702 x), in deviations of the mean",
                lambda n: n["from_sigmoid"],
                low=CHANCE,
            ),
        ),
    ),
    Claim(
        "The error falls as one over the root of the number of draws.",
        "the variance of a mean",
        (Criterion("power of the number of draws in the error", slopes, -0.6, -0.4),),
    ),
)


def make_table(numbers: Numbers) -> str:
    """Return the error for each number of draws."""
    columns = zip(*numbers["errors"], strict=True)
    rows = [[f"{draws:,}", spread(errors, 5)] for draws, errors in zip(numbers["draws"], columns, strict=True)]
    return table(["draws", "root mean square error over x"], rows)


def draw(figure: Any, numbers: Numbers) -> None:
    """Draw the means beside GELU, and the error against the number of draws."""
    values, errors = figure.subplots(1, 2)
    x = np.linspace(-3.2, 3.2, 100)
    values.plot(x, GELU().forward(x), color=BLUE, label="GELU")
    values.plot(GRID, numbers["averages"], "o", color=RED, label=f"mean of {numbers['draws'][0]} draws")
    values.set(xlabel="x")
    values.legend()
    draws = np.array(numbers["draws"])
    for seed in numbers["errors"]:
        errors.loglog(draws, seed, "o-", color=RED, linewidth=0.8)
    middle = np.exp(np.mean(np.log(numbers["errors"]), axis=0))
    errors.loglog(draws, middle[0] * np.sqrt(draws[0] / draws), ":", color=GREY, label="one over the root")
    errors.set(xlabel="draws", ylabel="error")
    errors.legend()


STUDY = Study(
    title="GELU as expected dropout",
    about="Nothing is trained. Each x is kept if a number drawn from the standard normal distribution is at most x, "
    "and set to zero if not. The mean over many draws is held against the package's GELU.",
    claims=CLAIMS,
    measure=measure,
    table=make_table,
    draw=draw,
    caption="The mean of the fewest draws beside the function; the root mean square of the error against the number "
    "of draws, a line a seed.",
    reading="The dropout of the paper depends on the value: what is large is nearly always kept, what is very negative "
    "nearly never. An ordinary dropout layer keeps every value with the same probability and so gives a multiple of x "
    "on average.",
)
