"""An evaluator that lives but answers no more is killed after a while, and replaced like one that died."""

import dataclasses
import functools
import os
import signal
import time
from typing import Any

import pytest

from rlsample.engine import ProcessEngine, ProcessSettings
from rlsample.errors import WorkerDiedError
from rlsample.evaluation import EvaluatorSet, EvaluatorSetSettings
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncSamplesOptimizer,
    AsyncSamplesSettings,
    SyncSamplesOptimizer,
)
from rlsample.testing import RowEvaluator

OPTIMIZERS: dict[str, Any] = {
    "sync": SyncSamplesOptimizer,
    "async gradients": AsyncGradientsOptimizer,
    "async samples": lambda evaluators: AsyncSamplesOptimizer(evaluators, AsyncSamplesSettings(train_batch_size=10)),
}


class CountingSet(EvaluatorSet):
    """Counts the rows that were handed over."""

    rows = 0

    def absorb(self, result: Any) -> Any:
        self.rows += result.num_rows if hasattr(result, "num_rows") else result.batch.count
        return super().absorb(result)


def run(make_optimizer: Any, budget: int) -> tuple[Any, Any]:
    """An optimizer in the middle of its work; one of its two evaluators has just been stopped."""
    engine = ProcessEngine(ProcessSettings(close_timeout_s=0.5))
    settings = EvaluatorSetSettings(max_evaluator_restarts=budget)
    evaluators: Any = CountingSet.create(functools.partial(RowEvaluator, sizes=(7,)), 2, engine, settings)
    optimizer = make_optimizer(evaluators)
    optimizer.step()
    engine.settings = dataclasses.replace(engine.settings, call_timeout_s=1.5)
    engine.pump._next_look = 0.0  # starting the workers does not count: a busy machine may need long for that
    os.kill(evaluators.remote[0].pid, signal.SIGSTOP)
    return evaluators, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_replaced_and_counts_stay_right(name: str):
    evaluators, optimizer = run(OPTIMIZERS[name], budget=1)
    with evaluators, optimizer:
        hung = evaluators.remote[0].pid
        while not evaluators.num_restarts:
            optimizer.step()
        trained = optimizer.num_steps_trained
        while optimizer.num_steps_trained < trained + 21:
            optimizer.step()
        assert optimizer.num_steps_sampled == evaluators.rows
        assert evaluators.num_restarts == 1
        assert evaluators.remote[0].incarnation == 1
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{hung}"):
            assert time.monotonic() < deadline


def step_for_ever(optimizer: Any) -> None:
    while True:
        optimizer.step()


def test_over_the_budget_it_is_an_error_that_says_what_happened():
    evaluators, optimizer = run(SyncSamplesOptimizer, budget=0)
    with evaluators, optimizer, pytest.raises(WorkerDiedError, match=r"worker 0 gave no sign of life for 1.5 s"):
        step_for_ever(optimizer)
