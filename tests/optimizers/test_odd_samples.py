"""Samples that are empty or do not fit, and errors between samples: nothing is lost, and nothing stands still."""

import functools
import threading

import numpy as np
import pytest

from rlsample.engine import InlineEngine, ThreadEngine
from rlsample.errors import ConfigError
from rlsample.evaluation import EvaluatorSet
from rlsample.evaluation.requests import Requests
from rlsample.optimizers import (
    AsyncGradientsOptimizer,
    AsyncGradientsSettings,
    AsyncReplayOptimizer,
    AsyncReplaySettings,
    AsyncSamplesOptimizer,
    AsyncSamplesSettings,
    MicrobatchOptimizer,
    MicrobatchSettings,
    SyncBatchReplayOptimizer,
    SyncBatchReplaySettings,
    SyncReplayOptimizer,
    SyncReplaySettings,
    SyncSamplesOptimizer,
    SyncSamplesSettings,
    async_replay_optimizer,
    async_samples_optimizer,
)
from rlsample.sample_batch import SampleBatch
from rlsample.testing.row_evaluator import RowEvaluator

REPLAY = {"learning_starts": 8, "buffer_size": 100, "train_batch_size": 4}


class SometimesEmpty(RowEvaluator):
    """Every third sample has no rows, and no columns either."""

    def sample(self):
        if self.num_samples % 3 == 1:
            self.num_samples += 1
            return SampleBatch({})
        return super().sample()


OPTIMIZERS = {
    "sync": SyncSamplesOptimizer,
    "sync, more": lambda e: SyncSamplesOptimizer(e, SyncSamplesSettings(train_batch_size=20, minibatch_size=6)),
    "async gradients": lambda e: AsyncGradientsOptimizer(e, AsyncGradientsSettings(grads_per_step=5)),
    "async samples": lambda e: AsyncSamplesOptimizer(e, AsyncSamplesSettings(train_batch_size=8)),
    "microbatch": lambda e: MicrobatchOptimizer(e, MicrobatchSettings(14, 7)),
    "replay": lambda e: SyncReplayOptimizer(e, SyncReplaySettings(**REPLAY)),
    "batch replay": lambda e: SyncBatchReplayOptimizer(e, SyncBatchReplaySettings(**REPLAY)),
    "apex": lambda e: AsyncReplayOptimizer(e, AsyncReplaySettings(**REPLAY)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_samples_without_rows_teach_nothing(name):
    make = functools.partial(SometimesEmpty, sizes=(7,))
    with (
        EvaluatorSet.create(make, 2, InlineEngine()) as evaluators,
        OPTIMIZERS[name](evaluators) as optimizer,
    ):
        for _ in range(9):
            optimizer.step()
        optimizer.close()
        weights = evaluators.local.get_weights()["w"]
        assert np.isfinite(weights).all()
        assert optimizer.num_steps_trained > 0
        assert optimizer.num_steps_sampled % 7 == 0


def test_an_evaluator_that_never_has_rows_is_an_error_and_no_wait_without_end():
    class Empty(RowEvaluator):
        def sample(self):
            return SampleBatch({})

    with EvaluatorSet.create(Empty, 1, InlineEngine()) as evaluators:
        optimizer = AsyncGradientsOptimizer(evaluators)
        with pytest.raises(ConfigError, match=r"Empty.sample\(\) returned no rows 1000 times in a row"):
            optimizer.step()


def steps(optimizer, number):
    for _ in range(number):
        optimizer.step()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_no_batch_is_refused_by_name(num_workers):
    class Forgetful(RowEvaluator):
        def sample(self):
            super().sample()

    with EvaluatorSet.create(Forgetful, num_workers, InlineEngine()) as evaluators:
        optimizer = SyncSamplesOptimizer(evaluators)
        with pytest.raises(ConfigError, match=r"Forgetful.sample\(\) returned NoneType, not a SampleBatch"):
            optimizer.step()


class AddsColumns(RowEvaluator):
    """Learning leaves its advantages in the batch, as evaluators may."""

    def compute_apply(self, samples):
        assert "advantages" not in samples
        samples["advantages"] = np.zeros(samples.count)
        return super().compute_apply(samples)


def test_what_learning_adds_to_a_batch_does_not_stay_in_the_replay_buffer():
    settings = SyncBatchReplaySettings(learning_starts=1, buffer_size=40, train_batch_size=8)
    optimizer = SyncBatchReplayOptimizer(EvaluatorSet(AddsColumns(sizes=(9, 5))), settings)
    for _ in range(40):  # some draws are one sample, others are joined
        optimizer.step()


class OddOnce(RowEvaluator):
    """The third sample of the first remote evaluator has another dtype."""

    def sample(self):
        batch = super().sample()
        if self.worker_index == 1 and self.num_samples == 3:
            batch["rewards"] = batch["rewards"].astype(np.float64)
        return batch


@pytest.mark.parametrize("ahead", [1, 2])
def test_after_a_sample_that_does_not_fit_apex_goes_on_asking(ahead):
    settings = AsyncReplaySettings(**REPLAY, max_sample_requests_in_flight=ahead)
    with (
        EvaluatorSet.create(functools.partial(OddOnce, sizes=(5,)), 1, ThreadEngine()) as evaluators,
        AsyncReplayOptimizer(evaluators, settings) as optimizer,
    ):
        with pytest.raises(ConfigError, match="rewards"):
            steps(optimizer, 1000)
        optimizer.step()
        assert optimizer._requests.in_flight() == ahead
        sampled = optimizer.num_steps_sampled
        for _ in range(1000):
            optimizer.step()
            if optimizer.num_steps_sampled >= sampled + 50:
                break
        assert optimizer.num_steps_sampled >= sampled + 50


class RefusesOnce:
    """A policy whose epsilon cannot be set the first time."""

    def __init__(self):
        self.epsilons = []

    def fix_epsilon(self, epsilon):
        self.epsilons.append(epsilon)
        if len(self.epsilons) == 1:
            raise FloatingPointError("nan-7")


def test_apex_starts_again_where_it_could_not_start():
    class Exploring(RowEvaluator):
        def __init__(self, worker_index):
            super().__init__(worker_index)
            self.policy = RefusesOnce()

    settings = AsyncReplaySettings(**REPLAY, per_worker_exploration=True)
    with (
        EvaluatorSet.create(Exploring, 1, InlineEngine()) as evaluators,
        AsyncReplayOptimizer(evaluators, settings) as optimizer,
    ):
        with pytest.raises(FloatingPointError, match="nan-7"):
            optimizer.step()
        for _ in range(20):
            optimizer.step()
        assert optimizer.num_updates > 0
        assert evaluators.foreach_evaluator(lambda e: e.policy.epsilons) == [[], [0.4, 0.4]]


def test_weights_that_cannot_be_had_once_are_had_later():
    class Refuses(RowEvaluator):
        asked = 0

        def get_weights(self):
            self.asked += 1
            if self.asked == 1:
                raise FloatingPointError("nan-7")
            return super().get_weights()

    with (
        EvaluatorSet.create(Refuses, 1, InlineEngine()) as evaluators,
        AsyncSamplesOptimizer(evaluators, AsyncSamplesSettings(train_batch_size=8)) as optimizer,
    ):
        with pytest.raises(FloatingPointError, match="nan-7"):
            optimizer.step()
        optimizer.step()
        assert optimizer.num_updates > 0


def test_an_answer_is_not_lost_because_the_one_before_could_not_be_used():
    class Fails(RowEvaluator):
        def apply_gradients(self, gradients):
            if not self.worker_index and not hasattr(self, "failed"):
                self.failed = True
                raise FloatingPointError("nan-7")
            super().apply_gradients(gradients)

    with EvaluatorSet.create(functools.partial(Fails, sizes=(3,)), 4, InlineEngine()) as evaluators:
        optimizer = AsyncGradientsOptimizer(evaluators, AsyncGradientsSettings(grads_per_step=4))
        with pytest.raises(FloatingPointError, match="nan-7"):
            optimizer.step()
        assert (optimizer.num_steps_sampled, optimizer.num_steps_trained) == (3, 0)
        assert optimizer._requests.in_flight() == 3  # they are there, and wait for the next step
        optimizer.step()
        assert optimizer.num_steps_trained == 12
        assert sum(evaluators.foreach_evaluator(lambda e: e.num_samples)) == 5


def test_as_many_requests_are_in_flight_as_asked_for():
    with EvaluatorSet.create(RowEvaluator, 3, InlineEngine()) as evaluators:
        requests = Requests(evaluators)
        requests.ask(1)
        requests.ask_all(2)
        assert [requests.in_flight(worker) for worker in range(3)] == [2, 2, 2]
        assert next(requests.ready(), None) is None  # nobody has waited yet
        requests.wait(6)
        first = next(requests.ready())
        requests.ask_all(2)
        assert [requests.in_flight(worker) for worker in range(3)] == [2, 2, 2]
        assert requests.in_flight() == 6
        answers = [first, *requests.take(6)]
        assert sorted(answer.worker for answer in answers) == [0, 0, 1, 1, 1, 2, 2]  # 1 was asked first


def test_remote_evaluators_are_asked_before_the_local_one_runs():
    begun = threading.Event()

    def meet(evaluator):
        if evaluator.worker_index:
            begun.set()
        else:
            assert begun.wait(10), "the remote one is not asked before the local one is done"
        return evaluator.worker_index

    with EvaluatorSet.create(RowEvaluator, 1, ThreadEngine(copies=False)) as evaluators:
        assert evaluators.foreach_evaluator(meet) == [0, 1]


@pytest.mark.parametrize("name", ["async samples", "apex"])
def test_a_step_does_not_wait_for_ever_for_samples_that_do_not_come(name, monkeypatch):
    class Slow(RowEvaluator):
        gate = threading.Event()

        def sample(self):
            assert self.gate.wait(20)
            return super().sample()

    monkeypatch.setattr(async_samples_optimizer, "_LONGEST_WAIT_S", 0.3)
    monkeypatch.setattr(async_replay_optimizer, "_LONGEST_WAIT_S", 0.3)
    with EvaluatorSet.create(Slow, 1, ThreadEngine(copies=False)) as evaluators:
        optimizer = OPTIMIZERS[name](evaluators)
        try:
            assert [optimizer.step() for _ in range(3)] == [{}, {}, {}]
            assert optimizer.num_steps_sampled == 0
            assert not Slow.gate.is_set()
            Slow.gate.set()
            while not optimizer.num_updates:
                optimizer.step()
        finally:
            Slow.gate.set()
            optimizer.close()


@pytest.mark.parametrize("name", ["async samples", "apex"])
def test_counters_of_a_whole_run_go_on_after_a_resume(name):
    with EvaluatorSet.create(RowEvaluator, 1, InlineEngine()) as evaluators, OPTIMIZERS[name](evaluators) as optimizer:
        while optimizer.num_updates < 3:
            optimizer.step()
        optimizer.close()
        state, updates = optimizer.save(), optimizer.num_updates
    with EvaluatorSet.create(RowEvaluator, 1, InlineEngine()) as evaluators, OPTIMIZERS[name](evaluators) as optimizer:
        optimizer.restore(state)
        assert optimizer.stats()["num_updates"] == updates


@pytest.mark.parametrize(
    "options",
    [{"num_sgd_iter": 0}, {"minibatch_buffer_size": 0}, {"num_data_load_threads": -1}, {"learner_queue_size": 0}],
)
def test_settings_are_refused_before_anything_is_started(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncSamplesSettings(num_data_loader_buffers=2, devices=("cpu", "cpu"), **options)


def test_a_buffer_that_does_not_fit_leaves_the_counters_alone():
    settings = SyncReplaySettings(**REPLAY, store_buffer_in_checkpoints=True)
    optimizer = SyncReplayOptimizer(EvaluatorSet(RowEvaluator()), settings)
    for _ in range(20):
        optimizer.step()
    state = optimizer.save()
    other = SyncReplayOptimizer(EvaluatorSet(RowEvaluator()), SyncReplaySettings(**{**REPLAY, "buffer_size": 50}))
    with pytest.raises(ConfigError, match="buffer_size"):
        other.restore(state)
    assert (other.num_steps_sampled, other.num_steps_trained) == (0, 0)


def test_rows_that_several_evaluators_dropped_are_added_up():
    class Drops(RowEvaluator):
        def get_timers(self):
            ms = 2.0 * self.worker_index if self.worker_index else np.nan
            return {"sampler/env_ms": ms, "sampler/polls": self.worker_index, "sampler/rows_dropped": self.worker_index}

    with EvaluatorSet.create(Drops, 2, InlineEngine()) as evaluators:
        for _ in range(2):
            list(evaluators.sample_round())
        timers = evaluators.get_timers()
        assert timers == {
            "sampler/env_ms": pytest.approx((2 + 2 * 4) / 3),
            "sampler/polls": 6,
            "sampler/rows_dropped": 6,
        }


class TellsProgress(RowEvaluator):
    """Notes with each sample what it had been told of the steps so far."""

    env_steps = 0

    def __init__(self, worker_index, sizes=(7,)):
        super().__init__(worker_index, sizes)
        self.seen = []

    def set_progress(self, env_steps):
        self.env_steps = env_steps

    def sample(self):
        self.seen.append(self.env_steps)
        return super().sample()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedules_of_all_evaluators_go_on_where_a_resumed_run_was(name):
    with EvaluatorSet.create(TellsProgress, 1, InlineEngine()) as evaluators, OPTIMIZERS[name](evaluators) as optimizer:
        optimizer.restore({**optimizer.save(), "num_steps_sampled": 5000})
        optimizer.step()
        optimizer.close()
        assert evaluators.foreach_evaluator(lambda e: e.seen[:1]) == [[], [5000]]
