"""Asynchronous gradients (A3C): whoever has a gradient ready is served, nobody waits for the others."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.evaluation.requests import Answer, Requests
from rlsample.optimizers.learner_stats import mean_stats
from rlsample.optimizers.policy_optimizer import PolicyOptimizer
from rlsample.settings import option

__all__ = ["AsyncGradientsOptimizer", "AsyncGradientsSettings"]


@dataclass(frozen=True)
class AsyncGradientsSettings:
    """Options of :class:`AsyncGradientsOptimizer`."""

    grads_per_step: int = option(100, "gradients that one step() applies")

    def __post_init__(self) -> None:
        if self.grads_per_step < 1:
            raise ConfigError(f"grads_per_step must be at least 1, not {self.grads_per_step}")


class AsyncGradientsOptimizer(PolicyOptimizer):
    """Remote evaluators sample and compute gradients. The first that is ready is applied to the local weights, and
    fresh weights go to that evaluator alone, which begins its next sample (Mnih et al. 2016, arXiv:1602.01783).

    Between steps nothing is in flight, except after an error; then the next step begins with what is.

    Raises:
        ConfigError: no remote evaluator.
    """

    def __init__(self, evaluators: EvaluatorSet, settings: AsyncGradientsSettings | None = None) -> None:
        super().__init__(evaluators)
        self.settings = settings or AsyncGradientsSettings()
        if not evaluators.num_remote:
            raise ConfigError("asynchronous gradients need remote evaluators: set num_workers to 1 or more")
        self._requests = Requests(evaluators)
        self._num_updates = 0
        self._wait_s = self._apply_s = self._dispatch_s = 0.0
        self._lag_number = self._lag_sum = self._lag_max = 0

    def step(self) -> dict[str, float]:
        """Applies ``grads_per_step`` gradients; statistics are means over them."""
        wanted = self.settings.grads_per_step
        self.evaluators.sync_weights()
        for worker in range(self.evaluators.num_remote):
            if self._requests.in_flight() < wanted and not self._requests.in_flight(worker):
                self._ask(worker)
        stats: list[dict[str, Any]] = []
        while self._requests.in_flight():
            started = time.perf_counter()
            self._requests.wait()
            self._wait_s += time.perf_counter() - started
            for answer in self._requests.ready():
                stats.append(self._apply(answer))
                if len(stats) + self._requests.in_flight() < wanted:
                    self._send_weights(answer.worker)
                    self._ask(answer.worker)
        return mean_stats(stats)

    def _ask(self, worker: int) -> None:
        self._requests.ask(worker, "sample_gradients", tag=self._num_updates)

    def _apply(self, answer: Answer) -> dict[str, Any]:
        """Counts the rows as sampled, then, once they are applied, as trained."""
        started = time.perf_counter()
        result = answer.value
        self.num_steps_sampled += result.num_rows
        self.evaluators.set_progress(self.num_steps_sampled)
        self.evaluators.local.apply_gradients(result.gradients)
        self.num_steps_trained += result.num_rows
        lag = self._num_updates - answer.tag
        self._lag_number, self._lag_sum, self._lag_max = (
            self._lag_number + 1,
            self._lag_sum + lag,
            max(self._lag_max, lag),
        )
        self._num_updates += 1
        self._apply_s += time.perf_counter() - started
        return result.stats

    def _send_weights(self, worker: int) -> None:
        started = time.perf_counter()
        self.evaluators.publish_weights()
        self.evaluators.send_weights(worker)
        self._dispatch_s += time.perf_counter() - started

    def stats(self) -> dict[str, float]:
        """Adds, over the gradients since the last call:

        * ``wait_time_s, apply_time_s, dispatch_time_s``: means per gradient;
        * ``gradient_lag_mean, gradient_lag_max``: updates between a gradient's weights and its use;
        * ``evaluator_restarts``: of the whole run.
        """
        number = max(1, self._lag_number)
        found = {
            "wait_time_s": self._wait_s / number,
            "apply_time_s": self._apply_s / number,
            "dispatch_time_s": self._dispatch_s / number,
            "gradient_lag_mean": self._lag_sum / number,
            "gradient_lag_max": self._lag_max,
            "evaluator_restarts": self.evaluators.num_restarts,
        }
        self._wait_s = self._apply_s = self._dispatch_s = 0.0
        self._lag_number = self._lag_sum = self._lag_max = 0
        return {**super().stats(), **found}
