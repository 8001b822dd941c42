"""A step of numpygpt, as its trainer makes it."""

import contextlib
from collections.abc import Callable

from benchmarks.sizes import BETAS, CLIP, LR, WEIGHT_DECAY, Size, Weights, batches
from numpygpt.model import TransformerLM
from numpygpt.ranks import Ranks
from numpygpt.threads import one_blas_thread
from numpygpt.train import TrainConfig, Trainer


def make_trainer(
    size: Size, weights: Weights, threads: int, device: str = "cpu", ranks: Ranks | None = None
) -> Trainer:
    """Return a trainer whose learning rate stays the same. Its batches come from outside, so it has no tokens."""
    model = TransformerLM(size.config)
    model.load_state_dict(weights)
    weights.clear()  # forked workers would keep them for good
    model.to(device)
    config = TrainConfig(
        batch_size=size.batch_size,
        lr=LR,
        min_lr=LR,
        warmup_steps=0,
        weight_decay=WEIGHT_DECAY,
        beta1=BETAS[0],
        beta2=BETAS[1],
        grad_clip=CLIP,
    )
    none = next(batches(size))[0][0, :0]
    return Trainer(model, none, none, config, threads, ranks)


def make_step(size: Size, weights: Weights, threads: int, device: str = "cpu") -> Callable[[], float]:
    """Return a function that makes one step, to its end on a GPU too, and returns its loss."""
    trainer, data = make_trainer(size, weights, threads, device), batches(size)
    stack = contextlib.ExitStack()
    stack.enter_context(one_blas_thread())  # as Trainer.run does for a whole run

    def step() -> float:
        assert stack  # which would end with the last that knows it
        loss = trainer.update(*next(data))["loss"]
        float(trainer.model.flat.value[0])  # a GPU answers when it has done all that it was asked before
        return loss

    return step
