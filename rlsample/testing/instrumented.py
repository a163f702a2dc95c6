"""Any evaluator, made to count its rows and to fail on demand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlsample.evaluation.policy_evaluator import PolicyEvaluator

__all__ = ["ERROR_TEXT", "Mishaps", "Record", "instrumented", "record_of"]

ERROR_TEXT = "nan-7"


@dataclass(frozen=True)
class Mishaps:
    """When an evaluator fails; None: never. All count from 1.

    Attributes:
        sample_error_at: the sample() of the first remote evaluator, or of a local one that samples, that raises.
        learn_error_at: the gradient computation, of each evaluator, that raises.
        death_at: the sample() in which the first remote evaluator's process is killed; its replacement lives.
    """

    sample_error_at: int | None = None
    learn_error_at: int | None = None
    death_at: int | None = None


class Record:
    """What an evaluator did.

    Attributes:
        rows_sampled: that ``sample`` returned.
        rows_learned: that a loss was computed on, by ``compute_gradients`` or ``compute_apply``.
        samples, learnings: how often.
    """

    def __init__(self) -> None:
        self.rows_sampled = self.rows_learned = self.samples = self.learnings = 0


def instrumented(
    make_evaluator: Callable[[int], PolicyEvaluator], mishaps: Mishaps, worker_index: int
) -> PolicyEvaluator:
    """``make_evaluator(worker_index)`` with ``recorded`` (a :class:`Record`), and the mishaps, on that very object."""
    evaluator: Any = make_evaluator(worker_index)
    record = evaluator.recorded = Record()
    sample, first = evaluator.sample, worker_index <= 1

    def counted_sample() -> Any:
        record.samples += 1
        if first and record.samples == mishaps.sample_error_at:
            raise FloatingPointError(ERROR_TEXT)
        if worker_index == 1 and record.samples == mishaps.death_at:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = sample()
        record.rows_sampled += batch.count
        return batch

    evaluator.sample = counted_sample
    nested: list[int] = []  # compute_apply may call compute_gradients
    for name in ("compute_gradients", "compute_apply"):
        setattr(evaluator, name, _counted_learning(getattr(evaluator, name), record, mishaps, nested))
    return evaluator


def _counted_learning(learn: Any, record: Record, mishaps: Mishaps, nested: list[int]) -> Any:
    def counted(samples: Any) -> Any:
        if nested:
            return learn(samples)
        record.learnings += 1
        if record.learnings == mishaps.learn_error_at:
            raise FloatingPointError(ERROR_TEXT)
        nested.append(1)
        try:
            result = learn(samples)
        finally:
            nested.pop()
        record.rows_learned += samples.count
        return result

    return counted


def record_of(evaluator: Any) -> Record:
    """For ``foreach_evaluator``."""
    return evaluator.recorded
