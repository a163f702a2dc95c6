"""What the train loop needs of an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlsample.evaluation.evaluator_set import EvaluatorSet

__all__ = ["PolicyOptimizer"]

R = TypeVar("R")
P = TypeVar("P", bound="PolicyOptimizer")


class PolicyOptimizer(ABC):
    """Drives evaluators: collects samples and turns them into updates. A context manager.

    Attributes:
        evaluators: closed by whoever made them, not by the optimizer.
        num_steps_sampled: rows that ``sample()`` returned; counted, never taken from settings.
        num_steps_trained: rows that a loss was computed on; a row used in k passes counts k times.
    """

    def __init__(self, evaluators: EvaluatorSet) -> None:
        self.evaluators = evaluators
        self.num_steps_sampled = 0
        self.num_steps_trained = 0

    @abstractmethod
    def step(self) -> dict[str, float]:
        """One unit of work, a few seconds at most; returns the learner's statistics.

        Raises what a sampler, learner or background thread raised; the counters then hold what was done.
        """

    def stats(self) -> dict[str, float]:
        """Counters and mean times since the last call."""
        return {"num_steps_sampled": self.num_steps_sampled, "num_steps_trained": self.num_steps_trained}

    def between_updates(self, work: Callable[[], R]) -> R:
        """Runs ``work`` while no weight changes, and returns its result: for a look at the local evaluator, such as its
        state for a checkpoint. An optimizer that learns in a thread of its own waits for the end of an update."""
        return work()

    def save(self) -> dict[str, Any]:
        """What a checkpoint needs beyond the evaluators: arrays, numbers, strings and dicts or lists of them."""
        return {"num_steps_sampled": self.num_steps_sampled, "num_steps_trained": self.num_steps_trained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`save`. Evaluators are told how many steps were sampled: schedules go on, too."""
        self.num_steps_sampled = int(state["num_steps_sampled"])
        self.num_steps_trained = int(state["num_steps_trained"])
        self.evaluators.set_progress(self.num_steps_sampled)

    def close(self) -> None:
        """Ends what the optimizer started. Idempotent, bounded in time."""
        return

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
