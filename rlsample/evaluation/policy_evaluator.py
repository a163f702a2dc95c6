"""The evaluator: something that samples and learns. Optimizers know nothing else.

Subclass it alone to bring your own sampling (``examples/bare_evaluator.py``), or use
:class:`~rlsample.evaluation.CommonPolicyEvaluator` to join an env and a policy.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlsample.sample_batch import SampleBatch

__all__ = ["PolicyEvaluator"]

R = TypeVar("R")
E = TypeVar("E", bound="PolicyEvaluator")


class PolicyEvaluator(ABC):
    """Samples with a policy and computes its updates. A context manager.

    Required: the five abstract methods. The rest has defaults that fit an evaluator without env, filter or state.
    """

    @abstractmethod
    def sample(self) -> SampleBatch:
        """Collects one batch with the current weights. The rows are counted by the caller: any number is right."""

    @abstractmethod
    def compute_gradients(self, samples: SampleBatch) -> tuple[Any, dict[str, Any]]:
        """Gradients on the samples, in any form :meth:`apply_gradients` takes, and statistics. Changes nothing."""

    @abstractmethod
    def apply_gradients(self, gradients: Any) -> None:
        """Updates the weights by gradients that this or another evaluator computed."""

    @abstractmethod
    def get_weights(self) -> Any:
        """A copy of the weights: a later update does not change it."""

    @abstractmethod
    def set_weights(self, weights: Any) -> None:
        """Takes over weights; changing the argument later changes nothing here."""

    def compute_apply(self, samples: SampleBatch) -> dict[str, Any]:
        """compute_gradients, then apply_gradients; returns the statistics. Override it if one pass can do both."""
        gradients, stats = self.compute_gradients(samples)
        self.apply_gradients(gradients)
        return stats

    def get_host(self) -> str:
        """Name of the machine this evaluator runs on."""
        return socket.gethostname()

    def apply(self, func: Callable[..., R], *args: Any) -> R:
        """``func(self, *args)``, where the evaluator lives."""
        return func(self, *args)

    def get_metrics(self) -> list[Any]:
        """Episodes finished since the last call (:class:`~rlsample.evaluation.EpisodeMetrics`), each given out once."""
        return []

    def set_progress(self, env_steps: int) -> None:
        """Tells the total of sampled env steps, for schedules."""
        return

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint needs; arrays, numbers, strings, bytes and dicts or lists of them."""
        return {"weights": self.get_weights()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`get_state`."""
        self.set_weights(state["weights"])

    def close(self) -> None:
        """Frees what the evaluator owns. Idempotent."""
        return

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
