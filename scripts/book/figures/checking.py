"""Figure of the page on checking gradients."""

import numpy as np
from matplotlib.figure import Figure

from book.figures import BACKWARD, FORWARD, FOURTH, THIRD
from numpygpt.array import Array
from numpygpt.gradcheck.complex_step import complexified
from numpygpt.gradcheck.oracles import difference
from numpygpt.layers import RMSNorm

WIDTH, SEED = 8, 0
STEPS = np.logspace(-14, 0, 57)


def errors(dtype: type) -> dict[str, list[float]]:
    """Return by how much each way to measure J v is off, relative to its size, for each step."""
    rng = np.random.default_rng(SEED)
    layer, exact = RMSNorm(WIDTH, dtype=dtype), RMSNorm(WIDTH, dtype=np.float64)
    z: Array = rng.standard_normal(WIDTH).astype(dtype)
    v = rng.standard_normal(WIDTH)
    exact.forward(z.astype(np.float64))
    jv = np.array([exact.backward(unit) for unit in np.eye(WIDTH)]) @ v  # backward's own, in float64

    def off(measured: Array) -> float:
        """Return the relative error."""
        return float(np.linalg.norm(measured - jv) / np.linalg.norm(jv))

    def f() -> Array:
        """Return the output as a copy."""
        return np.array(layer.forward(z), np.float64)

    found: dict[str, list[float]] = {"central": [], "Richardson": [], "complex": []}
    for h in STEPS:
        coarse, fine = difference(f, z, v, h), difference(f, z, v, h / 2)
        found["central"].append(off(coarse))
        found["Richardson"].append(off((4 * fine - coarse) / 3))
        moved = complexified(z.astype(np.float64))
        moved[...] = moved + 1j * h * v
        found["complex"].append(off(np.asarray(exact.forward(moved)).imag / h))
    return found


def steps() -> Figure:
    """Draw the error of each against the length of its step."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    wide, narrow = errors(np.float64), errors(np.float32)
    lines = [
        (narrow["central"], BACKWARD, "central difference, float32"),
        (wide["central"], FORWARD, "central difference, float64"),
        (wide["Richardson"], FOURTH, "Richardson step, float64"),
        (wide["complex"], THIRD, "complex step, float64"),
    ]
    for values, colour, name in lines:
        axes.plot(STEPS, np.maximum(values, 1e-17), color=colour, label=name)
    for dtype, colour in ((np.float32, BACKWARD), (np.float64, FORWARD)):
        axes.axvline(float(np.finfo(dtype).eps) ** (1 / 3), color=colour, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("step $h$")
    axes.set_ylabel("relative error of $Jv$")
    axes.set_ylim(1e-17, 1e4)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
