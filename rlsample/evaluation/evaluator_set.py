"""The evaluators an optimizer works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlsample.evaluation.policy_evaluator import PolicyEvaluator

__all__ = ["EvaluatorSet"]

R = TypeVar("R")


class EvaluatorSet:
    """One local evaluator, which learns, and any number of others that sample for it. A context manager.

    Args:
        local: owns the weights that are trained; samples itself if there are no others.
        remote: evaluators that only sample. Today they live in this process; engines bring other places.
    """

    def __init__(self, local: PolicyEvaluator, remote: Sequence[PolicyEvaluator] = ()) -> None:
        self.local = local
        self.remote = list(remote)

    @property
    def samplers(self) -> list[PolicyEvaluator]:
        """Those that sample: the remote ones, or the local one where there are none."""
        return self.remote or [self.local]

    def foreach_evaluator(self, func: Callable[[PolicyEvaluator], R]) -> list[R]:
        """``func`` of each evaluator, the local one first."""
        return [func(evaluator) for evaluator in [self.local, *self.remote]]

    def foreach_evaluator_with_index(self, func: Callable[[PolicyEvaluator, int], R]) -> list[R]:
        """As :meth:`foreach_evaluator`; the local one has index 0."""
        return [func(evaluator, i) for i, evaluator in enumerate([self.local, *self.remote])]

    def sync_weights(self) -> None:
        """Gives the local weights to all others: one copy made, each takes its own."""
        if self.remote:
            weights = self.local.get_weights()
            for evaluator in self.remote:
                evaluator.set_weights(weights)

    def get_metrics(self) -> list[Any]:
        """Episodes finished since the last call, of all evaluators."""
        return [episode for metrics in self.foreach_evaluator(lambda e: e.get_metrics()) for episode in metrics]

    def close(self) -> None:
        """Closes every evaluator, also if one fails to; then raises the first failure."""
        errors = []
        for evaluator in [self.local, *self.remote]:
            try:
                evaluator.close()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def __enter__(self) -> EvaluatorSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
