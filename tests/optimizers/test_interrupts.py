"""Ctrl-C in the middle of a step: the next step goes on, and everything closes."""

from __future__ import annotations

import functools
import random
import signal
import threading
import time
from typing import Any

import pytest

from rlsample.engine import ProcessEngine, ProcessSettings, process_engine
from rlsample.errors import WorkerDiedError
from rlsample.evaluation import EvaluatorSet
from rlsample.evaluation.evaluator_set import EvaluatorSetSettings
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncGradientsSettings,
    AsyncReplayOptimizer,
    AsyncReplaySettings,
    AsyncSamplesOptimizer,
    AsyncSamplesSettings,
    MicrobatchOptimizer,
    MicrobatchSettings,
    SyncReplayOptimizer,
    SyncReplaySettings,
    SyncSamplesOptimizer,
    SyncSamplesSettings,
)
from rlsample.optimizers.background import BackgroundThreads
from rlsample.optimizers.batch_queue import BatchQueue
from rlsample.optimizers.learner_thread import DirectSource, LearnerThread
from rlsample.testing.engine_probe import Probe
from rlsample.testing.row_evaluator import RowEvaluator

OPTIMIZERS: dict[str, Any] = {
    "sync": lambda ev: SyncSamplesOptimizer(ev, SyncSamplesSettings(train_batch_size=80)),
    "gradients": lambda ev: AsyncGradientsOptimizer(ev, AsyncGradientsSettings(grads_per_step=8)),
    "samples": lambda ev: AsyncSamplesOptimizer(ev, AsyncSamplesSettings(train_batch_size=20)),
    "microbatch": lambda ev: MicrobatchOptimizer(ev, MicrobatchSettings(train_batch_size=20, microbatch_size=7)),
    "replay": lambda ev: SyncReplayOptimizer(ev, SyncReplaySettings(learning_starts=20, train_batch_size=8)),
    "apex": lambda ev: AsyncReplayOptimizer(ev, AsyncReplaySettings(learning_starts=20, train_batch_size=8)),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_that_is_interrupted_anywhere_can_be_followed_by_another(name: str):
    settings = EvaluatorSetSettings(max_evaluator_restarts=1000)
    evaluators = EvaluatorSet.create(RowEvaluator, 2, ProcessEngine(ProcessSettings(close_timeout_s=1.0)), settings)
    watchdog = threading.Timer(60.0, evaluators.close)  # whoever waits for ever is woken with an error
    watchdog.daemon = True
    watchdog.start()
    optimizer, draws = OPTIMIZERS[name](evaluators), random.Random(0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        optimizer.step()
        started = time.perf_counter()
        for _ in range(4):
            optimizer.step()
        usual_s = (time.perf_counter() - started) / 4
        interrupted = 0
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + draws.random() * usual_s)
                optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            optimizer.step()
        assert interrupted > 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        started = time.monotonic()
        optimizer.close()
        evaluators.close()
        assert time.monotonic() - started < 10
        watchdog.cancel()
        watchdog.join()


def test_an_interrupt_while_an_answer_is_taken_fails_that_worker_and_no_other(monkeypatch, tmp_path):
    with ProcessEngine(ProcessSettings(close_timeout_s=0.5)) as engine:
        worker, other = (engine.create(functools.partial(Probe, str(tmp_path))) for _ in range(2))
        assert [w.call("echo", 1).result(20) for w in (worker, other)] == [1, 1]

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        future = worker.call("echo", 2)
        with monkeypatch.context() as patch:
            patch.setattr(process_engine, "_settle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                future.result(20)
        with pytest.raises(WorkerDiedError, match="worker 0 was killed by SIGKILL before it answered 'echo'"):
            future.result(20)
        assert other.call("echo", 3).result(20) == 3
        assert engine.replace(worker).call("identify").result(20) == (0, 1)


def test_an_errand_that_nobody_waits_for_any_more_is_not_run(monkeypatch):
    threads = BackgroundThreads()
    learner, ran = LearnerThread(threads, DirectSource(RowEvaluator(), BatchQueue(threads, 1))), []

    def interrupted(ready: Any, timeout_s: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threads, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learner.between_updates(lambda: ran.append(1))
    assert len(learner._errands) == 0


def test_a_start_that_broke_off_is_made_up_for_by_the_next_step(monkeypatch):
    """The learner is not left out, nor started twice."""
    from rlsample.engine import InlineEngine

    evaluators = EvaluatorSet.create(RowEvaluator, 1, InlineEngine())
    with evaluators, AsyncSamplesOptimizer(evaluators, AsyncSamplesSettings(train_batch_size=20)) as optimizer:
        start = LearnerThread.start

        def interrupted(learner: LearnerThread) -> None:
            start(learner)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(LearnerThread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert optimizer.step()["loss"] > 0
        assert [t.name for t in threading.enumerate()].count("rlsample learner") == 1
