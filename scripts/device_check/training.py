"""A model trained on the CPU and on the GPU, and by PyTorch there: the losses of all steps, and what a step takes.

Each training has a process of its own, the same starting weights and the same batches, float32 without TF32.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.runner import ChildFailed, installed, run_child, weights_of
from benchmarks.sizes import Size
from benchmarks.timing import CONTENDERS, OURS
from device_check.report import Row
from numpygpt.threads import usable_cores

WARM_UP = 20  # steps whose times don't count: kernels are compiled, memory is found
# The first so many losses are close, which a wrong gradient or optimiser wouldn't be. Then training makes more of each
# rounding: on the CPU weights changed by 6e-8 of themselves moved the first 20 losses at size S by 3e-7, and the first
# 200, which fall from 4.8 to 0.03, by up to 1e-3.
EARLY, CLOSE, NEAR = 20, 1e-4, 0.1

NOTES = f"""
training: the largest difference from the CPU's losses in the first {EARLY} steps and in all; right is up to
{CLOSE:.0e} and {NEAR}; a step's time is the median after {WARM_UP} steps; all in float32, without TF32"""

TRAININGS = {  # the contender and the device
    "numpygpt, CPU": (OURS, "cpu"),
    "numpygpt, GPU": (OURS, "cuda"),
    "PyTorch, eager, GPU": ("torch", "cuda"),
    "PyTorch, compiled, GPU": ("compile", "cuda"),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """What the steps of a training came to."""

    losses: list[float]
    times_s: list[float]

    @property
    def ms(self) -> str:
        """The median time of a step after the warm-up, or of the last step of so short a training."""
        return f"{1000 * statistics.median(self.times_s[WARM_UP:] or self.times_s[-1:]):,.1f}"

    def row(self, name: str, reference: "Training") -> Row:
        """Hold the losses against those of the CPU."""
        differences = np.abs(np.subtract(self.losses, reference.losses))
        early, largest = np.max(differences[:EARLY]), np.max(differences)
        right = early <= CLOSE and largest <= NEAR  # NaN is neither
        fault = "" if right else f"above {CLOSE:.0e}, or {NEAR} in all"
        return Row(name, (f"{early:.1e}, all {largest:.1e}", "", ""), self.ms, fault)


def trainings(size: Size, steps: int, names: Sequence[str]) -> Iterator[Row]:
    """Train one after the other, the CPU first; yield their rows."""
    reference = None
    with weights_of(size) as weights:
        for name in names:
            contender, device = TRAININGS[name]
            title = f"{steps} steps of {size.name}, {name}"
            missing = [package for package in CONTENDERS[contender].needs if not installed(package)]
            if missing:
                yield Row(title, remark=f'no {missing[0]}: pip install -e ".[bench]"')
                continue
            arguments = {"size": dataclasses.asdict(size), "weights": str(weights), "steps": steps}
            try:
                result = run_child(
                    "timing.train_on", weights.parent, usable_cores(), device=device, contender=contender, **arguments
                )
            except ChildFailed as error:
                ours = contender == OURS
                yield Row(title, fault=str(error)) if ours else Row(title, remark=f"failed: {error}")
                continue
            training = Training(**result)
            yield training.row(title, reference) if reference else Row(title, ms=training.ms, remark="the reference")
            reference = reference or training
