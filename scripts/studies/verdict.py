r"""When a claim holds: decided before the run, and then by the numbers alone.

A quantity is measured several times, once with each seed. Its mean $\bar x$ is known only to within an interval. Of $n$
measurements with deviation $s$ it is, by Student (1908), *The probable error of a mean*, Biometrika 6,

$$\bar x \pm q\, \frac{s}{\sqrt n} \tag{1}$$

with $q$ such that $|t| < q$ in 95 of 100 cases, for $t$ of Student's distribution with $n - 1$ degrees of freedom. Its
density is proportional to $(1 + t^2/\nu)^{-(\nu+1)/2}$. With $t = \sqrt\nu \tan\theta$ that is

$$\cos^{\nu - 1}\theta\; d\theta, \qquad -\pi/2 < \theta < \pi/2 \tag{2}$$

A claim puts the mean in a range. It holds if the whole interval lies in the range, it is refuted if none of it does,
and else the spread of the measurements leaves it undecided.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

HOLDS, REFUTED, UNDECIDED = "holds", "refuted", "undecided: within the spread"
CONFIDENCE = 0.95
Numbers = dict[str, Any]  # what a study measured, as JSON holds it


@functools.cache
def student_quantile(degrees: int) -> float:
    """Return q of (1) for so many degrees of freedom."""
    theta = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(theta) ** (degrees - 1)  # (2)
    share = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(np.interp(CONFIDENCE, share / share[-1], theta))


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the measurements, and the ends of its interval (1). ValueError for fewer than two."""
    if len(samples) < 2:
        raise ValueError(f"a spread takes at least two measurements, not {len(samples)}")
    mean = float(np.mean(samples))
    half = student_quantile(len(samples) - 1) * float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    return mean, mean - half, mean + half


def short(number: float) -> str:
    """Return a number in few digits."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e6 else f"{number:.3g}"


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A quantity whose mean a claim puts between `low` and `high`. One that is a `ratio` is judged by its logarithm."""

    quantity: str
    samples: Callable[[Numbers], Sequence[float]]
    low: float = -math.inf
    high: float = math.inf
    ratio: bool = False

    def interval(self, numbers: Numbers) -> tuple[float, float, float]:
        """Return the mean (of a ratio the geometric one) and the ends of its interval."""
        samples = self.samples(numbers)
        if not self.ratio:
            return interval(samples)
        mean, low, high = map(math.exp, interval(np.log(samples).tolist()))
        return mean, low, high

    def verdict(self, numbers: Numbers) -> str:
        """Return HOLDS, REFUTED or UNDECIDED."""
        _, low, high = self.interval(numbers)
        if self.low <= low and high <= self.high:
            return HOLDS
        return REFUTED if high < self.low or low > self.high else UNDECIDED

    @property
    def refuted_if(self) -> str:
        """What would refute the claim, in words."""
        if self.high == math.inf:
            return f"{self.quantity} is below {short(self.low)}"
        if self.low == -math.inf:
            return f"{self.quantity} is above {short(self.high)}"
        return f"{self.quantity} is outside {short(self.low)} to {short(self.high)}"

    def seen(self, numbers: Numbers) -> str:
        """What was measured, in words."""
        mean, low, high = map(short, self.interval(numbers))
        return f"{self.quantity}: {mean} ({low} to {high})"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What somebody says, where, and the criteria by which it holds: all of them, or it is refuted by one."""

    text: str
    source: str
    criteria: tuple[Criterion, ...]

    def verdict(self, numbers: Numbers) -> str:
        """Return HOLDS if all criteria do, REFUTED if one is, else UNDECIDED."""
        verdicts = {criterion.verdict(numbers) for criterion in self.criteria}
        return REFUTED if REFUTED in verdicts else UNDECIDED if UNDECIDED in verdicts else HOLDS
