"""Copies of a model, one for each worker, that share its weights and add into its gradient.

A replica keeps what its own backward needs, and so runs beside the others. All add into one gradient, each parameter's
in turn: replica 0, then 1, and so on. So the sums are formed in the same order, to the same bits, however the workers
run; nobody waits long, since all do the same work; and there is no second gradient, nor a pass to sum it up.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from numpygpt import forks
from numpygpt.array import Array
from numpygpt.forks import Forks
from numpygpt.layers.cross_entropy import CrossEntropy
from numpygpt.layers.dropout import Dropout
from numpygpt.model import TransformerLM
from numpygpt.module import Parameter, evaluating
from numpygpt.optim import Adam
from numpygpt.precision import products_in
from numpygpt.ranks import Ranks
from numpygpt.threads import BrokenOff, Threads

QUIET: Any = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}  # what isn't finite is refused by name
PATIENCE = 0.1  # seconds between two looks whether what one waits for will never come


class Turns:
    """Whose turn it is to add to a gradient: for each parameter and replica, a gate through which its blocks pass.

    A gate is a semaphore: how many of the parameter's blocks (Parameter.blocks, which are added to in order) the
    replica before has left behind it. Before replica 0 is the last one, so that a second use of a parameter (tied
    weights) comes after everybody's first.
    """

    def __init__(self, parameters: Sequence[Parameter], replicas: int, team: Threads | Forks):
        self.blocks = [len(p.blocks()) for p in parameters]
        self.gates = [[team.semaphore(n if number == 0 else 0) for number in range(replicas)] for n in self.blocks]
        self.broken = forks.shared(np.array([False]))  # off; and no lock, which one that is killed could keep
        self.team = team
        self.taking_part = 0

    def begin(self, taking_part: int) -> None:
        """Begin a round of the first so many replicas; of 0, nobody has to wait. Earlier rounds have ended."""
        self.taking_part = taking_part

    @contextlib.contextmanager
    def turn(self, parameter: int, number: int, blocks: int) -> Iterator[None]:
        """Wait for replica `number`'s turn to add to so many blocks, and let the next have its turn after.

        After the last replica comes the first again. BrokenOff if the turn will never come.
        """
        if not self.taking_part:
            yield
            return
        gates = self.gates[parameter]
        for _ in range(blocks):
            while not gates[number].acquire(timeout=PATIENCE):
                if self.broken[0] or self.team.lost():
                    raise BrokenOff
        yield
        for _ in range(blocks):
            gates[(number + 1) % self.taking_part].release()

    def mend(self) -> None:
        """Put all gates as they were, if the round before was broken off."""
        if self.broken[0]:
            for parameter, gates in enumerate(self.gates):
                for gate in gates:
                    while gate.acquire(timeout=0):
                        pass
                for _ in range(self.blocks[parameter]):
                    gates[0].release()
            self.broken[0] = False


class SharedGradient:
    """What a layer of a replica finds in `parameter.grad`: `+=` waits for its turn and adds to the model's gradient.

    Its first `fresh` rows are of this step. The others are old, and the first replica to add to them assigns: so no
    pass over the gradient is needed to make it zero, nor is zero read back to be added to.
    """

    def __init__(self, grad: Array, turns: Turns, parameter: int, number: int):
        self.grad, self.turns, self.parameter, self.number = grad, turns, parameter, number
        self.fresh = len(grad)

    def __iadd__(self, summand: Array) -> Self:
        self.add(slice(0, len(self.grad)), summand, self.turns.blocks[self.parameter])
        return self

    def __getitem__(self, rows: slice | Array) -> "SharedRows":
        return SharedRows(self, rows)

    def __setitem__(self, rows: slice | Array, value: "SharedRows") -> None:
        """Do nothing: `grad[rows] += x` has added to the rows before it assigns them."""

    def add(self, rows: slice | Array, summand: Array, blocks: int) -> None:
        """Add to rows that lie in so many blocks."""
        with self.turns.turn(self.parameter, self.number, blocks):
            if isinstance(rows, slice) and rows.start == self.fresh:
                self.grad[rows] = summand
                self.fresh = rows.stop
            else:
                self.finish()
                self.grad[rows] += summand

    def finish(self) -> None:
        """Make zero what is old."""
        self.grad[self.fresh :] = 0
        self.fresh = len(self.grad)


class SharedRows:
    """Some rows of a SharedGradient, a block or any without repetition: `grad[rows] += x` adds to them in turn."""

    def __init__(self, shared: SharedGradient, rows: slice | Array):
        self.shared, self.rows = shared, rows

    def __iadd__(self, summand: Array) -> Self:
        blocks = 1 if isinstance(self.rows, slice) else self.shared.turns.blocks[self.shared.parameter]
        self.shared.add(self.rows, summand, blocks)
        return self


class Replica:
    """A worker: a replica of the model, and what it does for a trainer."""

    def __init__(
        self, model: TransformerLM, optimizer: Adam, number: int, turns: Turns, dtype: str = "float32", before: int = 0
    ):
        """It is replica `number` of its process, and there are so many `before` it on ranks before this one.

        `dtype` is that of matrix products.
        """
        self.model, self.optimizer, self.number, self.turns, self.dtype = model, optimizer, number, turns, dtype
        self.gradients = [p.grad for p in model.parameters() if isinstance(p.grad, SharedGradient)]
        dropouts = [(name, m) for name, m in model.named_modules() if isinstance(m, Dropout) and m.p]
        self.generators = {f"{before + number}.{name}": dropout.rng for name, dropout in dropouts}  # of random numbers

    def train(self) -> None:
        """Let the model train."""
        self.model.train()

    def add_gradients(
        self, taking_part: int, loss: CrossEntropy, weight: float, inputs: Array, targets: Array
    ) -> float:
        """Forward and backward of a part of a batch: return `weight` times its loss, its gradients added.

        The first replicas do this at once, as many as are `taking_part`; of 0, this one alone. Raises
        FloatingPointError if the loss isn't finite.
        """
        self.turns.begin(taking_part)
        try:
            inputs, targets = self.to_device(inputs, targets)
            with products_in(self.dtype), np.errstate(**QUIET):
                mean = loss.mean(self.model.forward(inputs), targets)
                self.model.backward(loss.backward(weight))
            for shared in self.gradients:
                shared.finish()
            part_loss = loss.number(mean, targets, self.model.config.vocab_size)  # a GPU has all to do by now
            if not math.isfinite(part_loss):
                raise FloatingPointError(f"the loss is {part_loss}")
            return weight * part_loss
        except BaseException:
            self.turns.broken[0] = True
            raise

    def evaluate(self, loss: CrossEntropy, inputs: Array, targets: Array) -> float:
        """Return the mean loss of a part of the text."""
        inputs, targets = self.to_device(inputs, targets)
        with evaluating([*self.model.modules(), loss]), products_in(self.dtype), np.errstate(**QUIET):
            return loss.forward(self.model.forward(inputs), targets)

    def optimize(self, method: str, replicas: int, *args: Any) -> Any:
        """Do this worker's share of a step of the optimiser (see Adam.step)."""
        return getattr(self.optimizer, method)((self.number, replicas), *args)

    def generator_states(self) -> dict[str, Any]:
        """Return the state of every generator."""
        return {name: generator.bit_generator.state for name, generator in self.generators.items()}

    def set_generator_states(self, states: dict[str, Any]) -> None:
        """Bring every generator back to a state it was in."""
        for name, generator in self.generators.items():
            generator.bit_generator.state = states[name]

    def to_device(self, *arrays: Array) -> list[Array]:
        """Copy arrays to where the model is.

        Nobody waits for a GPU to take them: CuPy copies them through pinned memory of its own (`_array_default` in its
        _core/core.pyx), and leaves them to the queue.
        """
        return [np.asarray(array, like=self.model.flat.value) for array in arrays]


class Replicas:
    """So many replicas of a model, each run by a worker of its own. Of one, the model itself is the replica.

    They are those of one rank, and every rank has as many.
    """

    def __init__(
        self, model: TransformerLM, optimizer: Adam, count: int, dtype: str = "float32", ranks: Ranks | None = None
    ):
        """`dtype` is that of matrix products."""
        ranks = ranks or Ranks()
        parallel = count > 1
        # No forks of a rank: MPI's libraries have threads and network cards that a forked process hasn't.
        self.team = Forks() if parallel and forks.pay() and ranks.size == 1 else Threads()
        if isinstance(self.team, Forks):
            for buffer in model.buffers():
                if buffer.grad is not None:  # a frozen one isn't written to, so that it stays one without being shared
                    buffer.convert(forks.shared)
            optimizer.convert(forks.shared)
        self.optimizer = optimizer
        self.turns = Turns(model.parameters(), count, self.team)
        models = [self._copy(model, number) for number in range(count)] if parallel else [model]
        before, total = ranks.rank * count, ranks.size * count
        if total > 1:
            dropouts = [[m for m in replica.modules() if isinstance(m, Dropout)] for replica in [model, *models]]
            for original, *copies in zip(*dropouts, strict=True):
                for dropout, rng in zip(copies, original.rng.spawn(total)[before:][:count], strict=True):
                    dropout.rng = rng
        self.workers = [Replica(each, optimizer, i, self.turns, dtype, before) for i, each in enumerate(models)]
        self.team.start(self.workers)

    def _copy(self, model: TransformerLM, number: int) -> TransformerLM:
        shared = [vector for buffer in model.buffers() for vector in (buffer.value, buffer.grad)]
        for module in model.modules():
            shared += [item for item in vars(module).values() if isinstance(item, np.ndarray)]  # tables
        replica = copy.deepcopy(model, {id(array): array for array in shared})
        for i, p in enumerate(replica.parameters()):
            if p.trainable:
                p._grad = SharedGradient(p.grad, self.turns, i, number)
        for module in replica.modules():
            del module.saved
        return replica

    @property
    def models(self) -> list[TransformerLM]:
        """The replicas, as they are in this process."""
        return [worker.model for worker in self.workers]

    def zero_grad(self) -> None:
        """Set every gradient to zero, or have the first replica do that when it adds."""
        if len(self.workers) == 1:
            self.optimizer.zero_grad()
        for shared in self.workers[0].gradients:
            shared.fresh = 0

    def call(self, method: str, parts: Sequence[tuple], at_once: bool = True) -> list[Any]:
        """Return [replica.method(*part)] for the first replicas, as many as there are parts, all at once.

        An error is raised when all have ended. Or not at once: one after the other, all in this thread.
        """
        self.turns.mend()
        if at_once:
            return self.team.call(method, parts)
        return [getattr(worker, method)(*part) for worker, part in zip(self.workers, parts, strict=False)]

    def deal(self, method: str, *args: Any) -> list[Any]:
        """Have every worker do its share of a step of the optimiser (see Adam.step)."""
        replicas = len(self.workers)
        return self.call("optimize", [(method, replicas, *args)] * replicas)
