"""Asynchronous gradients: the first that is ready, fresh weights for its evaluator alone, rows counted."""

from __future__ import annotations

import functools
import threading
from typing import Any, ClassVar

import numpy as np
import pytest

from rlsample.engine import InlineEngine, ThreadEngine
from rlsample.errors import ConfigError
from rlsample.evaluation import EvaluatorSet
from rlsample.optimizers import AsyncGradientsOptimizer, AsyncGradientsSettings
from rlsample.testing.row_evaluator import RowEvaluator


def test_case_24_steps_are_counted_from_the_data():
    with EvaluatorSet.create(RowEvaluator, 1, InlineEngine()) as evaluators:
        optimizer = AsyncGradientsOptimizer(evaluators, AsyncGradientsSettings(grads_per_step=1))
        counts = []
        for _ in range(3):
            optimizer.step()
            counts.append((optimizer.num_steps_sampled, optimizer.num_steps_trained))
    assert counts == [(7, 7), (20, 20), (25, 25)]


def test_a_step_applies_just_so_many_gradients_and_leaves_none_in_flight():
    with EvaluatorSet.create(functools.partial(RowEvaluator, sizes=(3,)), 4, ThreadEngine()) as evaluators:
        local: Any = evaluators.local
        for wanted in (1, 3, 10):
            before = local.weights[1]
            optimizer = AsyncGradientsOptimizer(evaluators, AsyncGradientsSettings(grads_per_step=wanted))
            stats = optimizer.step()
            assert local.weights[1] - before == wanted
            assert optimizer.num_steps_trained == 3 * wanted
            assert optimizer._requests.in_flight() == 0
            assert stats["loss"] > 0
        assert sum(evaluators.foreach_evaluator(lambda e: e.num_samples)) == 14


class Staged(RowEvaluator):
    """The first sample of evaluator 1 takes until evaluator 2 begins its fourth."""

    order: ClassVar[list[tuple[int, float]]]
    fourth: ClassVar[threading.Event]

    def sample(self) -> Any:
        if self.worker_index == 1 and self.num_samples == 0:
            assert self.fourth.wait(10), "the optimizer waits for the oldest gradient"
        if self.worker_index == 2 and self.num_samples == 3:
            self.fourth.set()
        self.order.append((self.worker_index, self.weights[1]))
        return super().sample()


def test_the_first_gradient_that_is_ready_is_applied_and_fresh_weights_go_to_its_evaluator_alone():
    """Evaluator 2 delivers three gradients while evaluator 1 is at its first, whose weights are old then."""

    class Now(Staged):
        order: ClassVar[list[tuple[int, float]]] = []
        fourth = threading.Event()

    with EvaluatorSet.create(Now, 2, ThreadEngine(copies=False)) as evaluators:
        local: Any = evaluators.local
        local.weights = np.array([0.0, 100.0])
        optimizer = AsyncGradientsOptimizer(evaluators, AsyncGradientsSettings(grads_per_step=5))
        optimizer.step()
        seen_by_2 = [weights for worker, weights in Now.order if worker == 2]
        assert seen_by_2[:4] == [100.0, 101.0, 102.0, 103.0]
        assert next(weights for worker, weights in Now.order if worker == 1) == 100.0
        stats = optimizer.stats()
    assert stats["gradient_lag_max"] in (3, 4)  # the slow one's; the fourth of the quick one may come before it
    assert stats["gradient_lag_mean"] == pytest.approx(stats["gradient_lag_max"] / 5, abs=0.21)
    assert optimizer.stats()["gradient_lag_max"] == 0


def test_after_an_error_the_next_step_goes_on():
    class Fails(RowEvaluator):
        def compute_gradients(self, samples: Any) -> Any:
            if self.worker_index == 1 and self.num_samples == 2:
                raise FloatingPointError("nan-7")
            return super().compute_gradients(samples)

    with EvaluatorSet.create(functools.partial(Fails, sizes=(3,)), 2, InlineEngine()) as evaluators:
        optimizer = AsyncGradientsOptimizer(evaluators, AsyncGradientsSettings(grads_per_step=6))
        with pytest.raises(FloatingPointError, match="nan-7"):
            optimizer.step()
        done = optimizer.num_steps_trained
        assert done == optimizer.num_steps_sampled == 3 * evaluators.local.get_weights()["w"][1]
        optimizer.step()
        assert optimizer.num_steps_trained == done + 18


def test_schedules_hear_of_the_steps():
    class Hears(RowEvaluator):
        heard = 0

        def set_progress(self, env_steps: int) -> None:
            self.heard = env_steps

    with EvaluatorSet.create(functools.partial(Hears, sizes=(4,)), 1, InlineEngine()) as evaluators:
        optimizer = AsyncGradientsOptimizer(evaluators, AsyncGradientsSettings(grads_per_step=3))
        optimizer.step()
        assert evaluators.foreach_evaluator(lambda e: e.heard) == [12, 8]


def test_no_remote_evaluator():
    with EvaluatorSet.create(RowEvaluator, 0) as evaluators, pytest.raises(ConfigError, match="num_workers"):
        AsyncGradientsOptimizer(evaluators)
    with pytest.raises(ConfigError, match="grads_per_step"):
        AsyncGradientsSettings(grads_per_step=0)
    assert AsyncGradientsSettings().grads_per_step == 100
