r"""The optimiser: Adam and AdamW, clipping, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from numpygpt.array import Array, check_not_negative
from numpygpt.module import Parameter, Span, spans

PIECE = 2**16  # elements of a vector worked on at once, so that a step's temporary arrays stay in the cache
Share = tuple[int, int]  # (i, n): of all pieces the i-th, the (i + n)-th and so on
WHOLE = (0, 1)
SETTINGS = ("lr", "betas", "eps", "weight_decay", "t")  # of a step, besides its arrays


class NotFinite(FloatingPointError):
    """A gradient isn't finite."""


def bounds(vector: Array) -> list[tuple[int, int]]:
    """Return where the pieces of a vector start and stop; on another device than the CPU it is one piece."""
    size = PIECE if isinstance(vector, np.ndarray) else len(vector)
    return [(start, min(start + size, len(vector))) for start in range(0, len(vector), size)]


def pieces(vectors: Iterable[Span]) -> list[Span]:
    """Cut vectors into pieces."""
    return [
        span._replace(start=span.start + start, stop=span.start + stop)
        for span in vectors
        for start, stop in bounds(span.value)
    ]


def cut(vectors: Iterable[Array]) -> list[Array]:
    """Cut arrays as their spans are cut."""
    return [vector[start:stop] for vector in vectors for start, stop in bounds(vector)]


def squares(vectors: list[Span], share: Share = WHOLE) -> list[float]:
    """Return the sum of the squared gradients of each piece in a share: infinite by overflow, or NaN, if need be."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [np.dot(piece.grad, piece.grad) for piece in pieces(vectors)[share[0] :: share[1]]]
    return [float(square) for square in sums]  # all are under way before a GPU is waited for


def grad_norm(vectors: list[Span], squares: list[float]) -> float:
    """Return the norm of all gradients together, as clip_grad_norm says, from the sums of their squares.

    Raises NotFinite, which names the parameter, if a gradient isn't finite.
    """
    norm = math.sqrt(sum(sorted(squares)))  # an order that doesn't depend on how they were shared
    if 1e-12 < norm < math.inf:
        return norm
    for p in (p for span in vectors for p in span.buffer.parameters if span.start <= p.offset < span.stop):
        if not np.all(np.isfinite(p.grad)):
            raise NotFinite(f"the gradient of {p.name or 'a parameter'} {p.shape} is not finite")
    largest = max((float(np.max(np.abs(span.grad))) for span in vectors), default=0.0)
    if largest == 0.0:
        return 0.0
    scaled = (span.grad / largest for span in vectors)
    return largest * math.sqrt(sum(float(np.dot(g, g)) for g in scaled))


def clip_grad_norm(parameters: Iterable[Parameter], max_norm: float) -> float:
    r"""Scale all gradients together so that their norm is at most `max_norm`; return the norm there was.

    Source: Pascanu, Mikolov & Bengio (2013), arXiv:1211.5063, algorithm 1.

    $$N = \sqrt{\textstyle\sum_p \sum_j g_{pj}^2} \tag{1}$$
    $$g \leftarrow g \cdot \min(1,\ N_{\max} / N) \tag{2}$$

    Squares of float32 overflow beyond 1.8e19 and vanish below 1e-23. If (1) is near either end, it is taken of
    $g/M$, $M = \max|g|$, and multiplied by $M$. A shared parameter counts once. A gradient of zeros stays.

    **Reading.** The direction is kept, the length is bounded: at a cliff of the loss the step is no longer than
    elsewhere.

    Raises FloatingPointError if a gradient isn't finite, and ValueError unless max_norm is positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm!r}")
    vectors = spans(parameters)
    norm = grad_norm(vectors, squares(vectors))  # (1)
    if norm > max_norm:
        for span in vectors:
            grad = span.grad
            grad *= max_norm / norm  # (2)
    return norm


class Adam:
    r"""Adam: steps of the size of the learning rate, whatever the size of the gradients.

    Source: Kingma & Ba (2015), arXiv:1412.6980, algorithm 1; `weight_decay` adds an L2 penalty to the gradient
    ($g \leftarrow g + \lambda p$), on matrices only.

    **A step.** With $t = 1, 2, \dots$, element by element,

    $$m_t = \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \tag{1}$$
    $$v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \tag{2}$$
    $$\hat m_t = \frac{m_t}{1 - \beta_1^t}, \qquad \hat v_t = \frac{v_t}{1 - \beta_2^t} \tag{3}$$
    $$p \leftarrow p - \eta\, \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon} \tag{4}$$

    **Why (3).** Unroll (1) from $m_0 = 0$: each earlier gradient has been multiplied by $\beta_1$ once a step,

    $$m_t = (1 - \beta_1) \sum_{i=1}^t \beta_1^{t-i}\, g_i \tag{5}$$

    If the gradients have one expected value $E[g_i] = E[g]$, it comes out of the sum, which is geometric,
    $\sum_{i=1}^t \beta_1^{t-i} = \sum_{j=0}^{t-1} \beta_1^j = (1 - \beta_1^t)/(1 - \beta_1)$:

    $$E[m_t] = (1 - \beta_1)\, E[g]\, \frac{1 - \beta_1^t}{1 - \beta_1} = (1 - \beta_1^t)\, E[g] \tag{6}$$

    Starting at zero, the average is too small by exactly that factor, and (3) divides it out. The same holds for $v$
    with $g^2$ and $\beta_2$. Uncorrected, the first step would have $m_1/\sqrt{v_1} = (1-\beta_1)/\sqrt{1-\beta_2}$,
    about 3 in place of 1.

    $\varepsilon$ is added after the correction; adding it to $\sqrt{v_t}$ would make it weigh
    $1/\sqrt{1-\beta_2^t}$ times as much. The state $m_t$, $v_t$ stays uncorrected.

    **Reading.** $\hat m/\sqrt{\hat v}$ is a signal-to-noise ratio: gradients that agree give full steps of size $\eta$,
    those that contradict each other small ones. (One after a long silence can give
    $(1-\beta_1)/\sqrt{1-\beta_2}$ times as much.)

    Parameters that are frozen stay as they are. Moments are flat vectors beside the parameters' own, on their device:
    make the optimiser after moving or freezing the model (else `step` raises TypeError). `step` raises
    FloatingPointError if a gradient isn't finite. A bad setting is a ValueError.
    """

    decoupled = False

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers, each at least 0 and below 1, not {betas!r}")
        if eps == 0:
            raise ValueError("eps must be above 0: a weight that never had a gradient would become 0/0")
        self.parameters = [p for p in parameters if p.trainable]
        self.spans = spans(self.parameters)
        if not self.spans:
            raise ValueError("there are no parameters to optimise")
        if any(span.value.dtype.type(eps) == 0 for span in self.spans):
            raise ValueError(f"eps {eps!r} is 0 in {self.spans[0].value.dtype}: take a larger one")
        # Python's floats: NumPy's would turn float32 arrays into float64.
        self.lr, self.eps, self.weight_decay = float(lr), float(eps), float(weight_decay)
        self.betas = float(betas[0]), float(betas[1])
        self.t = 0
        self.m, self.v = ([np.zeros(w.shape, w.dtype, like=w) for w in (s.value for s in self.spans)] for _ in "mv")

    def convert(self, function: Callable[[Array], Array]) -> None:
        """Replace the moments by `function` of them."""
        self.m, self.v = ([function(vector) for vector in vectors] for vectors in (self.m, self.v))

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        for span in self.spans:
            span.grad[...] = 0

    def step(
        self, max_norm: float = math.inf, deal: Callable[..., list[Any]] | None = None, factor: float = 1.0
    ) -> float:
        """Update every parameter as if clip_grad_norm had clipped its gradient; return the norm there was.

        Gradients count `factor` times: of a scaled loss, that is one over its scale (LossScale, eq. 3).
        The gradients themselves stay. `deal(method, *args)` may have the named method of this optimiser, or of copies
        that share its arrays, called for each of n shares, (0, n) to (n - 1, n), and return the list of what that
        returns; the result is the same.
        """
        check_not_negative(lr=self.lr)
        moved = any(type(m) is not type(span.value) for span, m in zip(self.spans, self.m, strict=True))
        if moved or spans(self.parameters) != self.spans:
            raise TypeError("the parameters were moved after this optimiser was made; make a new one")
        deal = deal or (lambda method, *args: [getattr(self, method)(WHOLE, *args)])
        norm = factor * grad_norm(self.spans, [square for squares in deal("squares") for square in squares])
        scale = max_norm / norm if norm > max_norm else 1.0
        largest = math.sqrt(float(np.finfo(self.spans[0].value.dtype).max))
        if scale * norm > largest:  # v would be infinite, and a weight never move again
            raise FloatingPointError("the squares of the gradients overflow; nothing was changed, clip them first")
        self.t += 1
        deal("update_share", {name: vars(self)[name] for name in SETTINGS}, factor * scale)
        return norm

    def squares(self, share: Share) -> list[float]:
        """Return the sums of squared gradients of a share of the pieces."""
        return squares(self.spans, share)

    def update_share(self, share: Share, settings: dict[str, Any], scale: float) -> None:
        """Update a share of the pieces, with gradients times `scale` and the settings of whoever calls for it."""
        vars(self).update(settings)
        i, n = share
        for span, m, v in list(zip(pieces(self.spans), cut(self.m), cut(self.v), strict=True))[i::n]:
            decay = self.weight_decay if span.decays else 0.0
            self.update(span.value, scale * span.grad if scale != 1 else span.grad, m, v, decay)

    def update(self, p: Array, g: Array, m: Array, v: Array, decay: float) -> None:
        """Update one piece in place, the gradient excepted."""
        (beta1, beta2), lr = self.betas, self.lr
        if decay and not self.decoupled:
            g = g + decay * p
        m *= beta1
        m += (1 - beta1) * g  # (1)
        v *= beta2
        squared = g * g
        squared *= 1 - beta2
        v += squared  # (2)
        scale1, scale2 = 1 / (1 - beta1**self.t), 1 / (1 - beta2**self.t)  # the factors of (3), by (5) and (6)
        denominator = np.sqrt(v, out=squared)
        denominator *= math.sqrt(scale2)  # (3), under the root
        denominator += self.eps
        step = m / denominator
        step *= lr * scale1  # (3), (4)
        if decay and self.decoupled:
            p *= 1 - lr * decay  # AdamW (1)
        p -= step  # (4)

    def state_dict(self) -> dict[str, Array]:
        """Return a copy of the steps made, "t", and of the moments, "m." and "v." before each parameter's name."""
        moments = {name: moment.copy() for name, moment in self._named_moments()}
        return {"t": np.array(self.t), **moments}

    def load_state_dict(self, state: dict[str, Array]) -> None:
        """Copy steps and moments from `state`. Raises ValueError, before any change, unless names and shapes match."""
        own = dict(self._named_moments())
        missing, unknown = sorted({"t", *own} - state.keys()), sorted(state.keys() - {"t", *own})
        if missing or unknown:
            raise ValueError(f"state does not fit these parameters: missing {missing}, unknown {unknown}")
        if state["t"].shape != () or state["t"].dtype.kind not in "iu" or state["t"] < 0:
            raise ValueError(f"t must be one integer of at least 0, not {state['t']!r}")
        for name, moment in own.items():
            if (state[name].shape, state[name].dtype) != (moment.shape, moment.dtype):
                here, given = f"{moment.shape} {moment.dtype}", f"{state[name].shape} {state[name].dtype}"
                raise ValueError(f"{name} is {here} here and {given} in the given state")
        self.t = int(state["t"])
        for name, moment in own.items():
            moment[...] = np.asarray(state[name], like=moment)

    def _named_moments(self) -> Iterator[tuple[str, Array]]:
        """Yield views of the moments in the shapes of their parameters; one without a name goes by its number."""
        for number, p in enumerate({id(p): p for p in self.parameters}.values()):
            i = next(i for i, s in enumerate(self.spans) if s.buffer is p.buffer and s.start <= p.offset < s.stop)
            here = slice(p.offset - self.spans[i].start, p.offset - self.spans[i].start + p.size)
            yield f"m.{p.name or number}", self.m[i][here].reshape(p.shape)
            yield f"v.{p.name or number}", self.v[i][here].reshape(p.shape)


class AdamW(Adam):
    r"""Adam with decoupled weight decay.

    Source: Loshchilov & Hutter (2019), arXiv:1711.05101, algorithm 2. **Departure:** the decay is multiplied by the
    current learning rate, as in PyTorch. With Adam's (1) to (3) from the gradient alone,

    $$p \leftarrow p - \eta\, \lambda\, p - \eta\, \frac{\hat m_t}{\sqrt{\hat v_t} + \varepsilon} \tag{1}$$

    **Reading.** An L2 penalty inside $g$ would be divided by $\sqrt{\hat v}$ like everything in it: weights with
    large gradients would hardly decay. Outside it, every matrix shrinks by the same factor $1 - \eta\lambda$ a
    step. Only matrices (linear and embedding weights) decay, never gains and biases: their natural place isn't 0.
    """

    decoupled = True

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(parameters, lr, betas, eps, weight_decay)


def cosine_schedule(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int) -> float:
    r"""Return the learning rate of `step` (counted from 0): linear warm-up, half a cosine down, then flat.

    Source: Loshchilov & Hutter (2017), arXiv:1608.03983, eq. 5, for one cycle with a warm-up before it. With $w$
    warm-up steps and $d$ the step from which the rate is flat,

    $$\eta_s = \eta_{\max}\, \frac{s + 1}{w}, \qquad s < w \tag{1}$$
    $$\eta_s = \eta_{\min} + \tfrac12\,(\eta_{\max} - \eta_{\min})\,\Big(1 + \cos \pi\, \frac{s - w}{d - w}\Big),
      \qquad w \le s < d \tag{2}$$
    $$\eta_s = \eta_{\min}, \qquad s \ge d \tag{3}$$

    The first step is not zero, and step $w - 1$ is the peak exactly. With $d = w$ the warm-up is followed by (3).
    """
    if not (0 <= warmup_steps <= decay_steps):
        raise ValueError(f"0 <= warmup_steps <= decay_steps must hold, not {warmup_steps} and {decay_steps}")
    if not (0 <= min_lr <= max_lr):
        raise ValueError(f"0 <= min_lr <= max_lr must hold, not {min_lr} and {max_lr}")
    if step < 0:
        raise ValueError(f"step must be at least 0, not {step}")
    if step < warmup_steps:
        return max_lr * ((step + 1) / warmup_steps)  # (1)
    if step >= decay_steps:
        return min_lr  # (3)
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * progress))  # (2)
