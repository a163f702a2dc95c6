"""Statistics of several updates as one, and what a learner does in a stretch of time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsample.optimizers.background import Timers

if TYPE_CHECKING:
    from rlsample.optimizers.learner_thread import Progress

__all__ = ["SinceLastStats", "mean_stats"]


def mean_stats(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each statistic over the updates that have it; empty for no updates."""
    names = dict.fromkeys(name for one in stats for name in one)
    return {name: float(np.mean([one[name] for one in stats if name in one])) for name in names}


class SinceLastStats:
    """What ``stats()`` of an optimizer with a learner thread tells of the time since it was last called."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.restart(0, 0)

    def restart(self, num_steps_sampled: int, num_steps_trained: int) -> None:
        """The time begins now, at these counts."""
        self._started = time.perf_counter()
        self._sampled, self._trained = num_steps_sampled, num_steps_trained
        self._lag_sum, self._lag_rows, self._lag_max = 0.0, 0, 0

    def add(self, progress: Progress) -> None:
        """Takes in what the learner has done."""
        self._lag_sum += progress.lag_mean * progress.num_steps_trained
        self._lag_rows += progress.num_steps_trained
        self._lag_max = max(self._lag_max, progress.lag_max)

    def take(self, num_steps_sampled: int, num_steps_trained: int) -> dict[str, float]:
        """Ends the time, at these counts, and begins the next.

        sampled_steps_per_s, trained_steps_per_s · policy_lag_mean, policy_lag_max: updates between a row's weights and
        its use · learner_wait_share: part of the learner's time without data · the timers' seconds.
        """
        seconds = max(1e-9, time.perf_counter() - self._started)
        times = self._timers.drain()
        busy, waited = times.get("compute_s", 0.0), times.get("learner_wait_s", 0.0)
        found = {
            "sampled_steps_per_s": (num_steps_sampled - self._sampled) / seconds,
            "trained_steps_per_s": (num_steps_trained - self._trained) / seconds,
            "policy_lag_mean": self._lag_sum / max(1, self._lag_rows),
            "policy_lag_max": self._lag_max,
            "learner_wait_share": waited / (waited + busy) if waited + busy else 0.0,
            **times,
        }
        self.restart(num_steps_sampled, num_steps_trained)
        return found
