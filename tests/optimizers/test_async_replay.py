"""Ape-X: rows go to shards, errors back to the shard of a row, weights out by the row count; bounded and counted."""

import functools
import pickle
import threading
import time

import numpy as np
import pytest

from rlsample.engine import InlineEngine, ProcessEngine, ProcessSettings, ThreadEngine
from rlsample.errors import ConfigError, LearnerError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.optimizers import AsyncReplayOptimizer, AsyncReplaySettings
from rlsample.optimizers.async_replay_optimizer import worker_epsilon
from rlsample.optimizers.background import BackgroundThreads, Timers
from rlsample.optimizers.batch_queue import BatchQueue
from rlsample.optimizers.replay_shards import replay_forever
from rlsample.policy import DQNPolicy, DQNSettings, ModelSettings
from rlsample.sample_batch import SampleBatch
from rlsample.testing.optimizer_rules import OPTIMIZER_RULES, check_optimizer
from rlsample.testing.row_evaluator import RowEvaluator


class Learner(RowEvaluator):
    """Its TD error of a row is that row's id; it may learn only when told to."""

    gate: threading.Semaphore | None = None

    def __init__(self, worker_index=0, sizes=(7, 13, 5)):
        super().__init__(worker_index, sizes)
        self.learned = []

    def compute_apply(self, samples):
        if self.gate is not None:
            self.gate.acquire()
        self.learned.append(samples["id"].copy())
        return {**super().compute_apply(samples), "td_errors": samples["id"].astype(np.float32)}


SMALL = {"learning_starts": 20, "buffer_size": 400, "train_batch_size": 8, "max_weight_sync_delay": 20}


def apex(evaluators, **options):
    return AsyncReplayOptimizer(evaluators, AsyncReplaySettings(**{**SMALL, **options}))


def thread_set(num_workers=2, make=Learner):
    return EvaluatorSet.create(make, num_workers, ThreadEngine())


def steps(optimizer, number):
    for _ in range(number):
        optimizer.step()


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def counted(shard):
    """The sizes of the batches that the shard is given from now on."""
    sizes, add = [], shard.add
    shard.add = lambda batch: (sizes.append(batch.count), add(batch))
    return sizes


def test_rows_are_whole_and_counts_are_counted():
    with thread_set() as evaluators, apex(evaluators, num_replay_buffer_shards=3) as optimizer:
        added = [counted(shard) for shard in optimizer.shards]
        while optimizer.num_updates < 30:
            optimizer.step()
        optimizer.close()
        learned = evaluators.local.learned
        assert {len(ids) for ids in learned} == {8}
        assert {int(i) // 1_000_000 for ids in learned for i in ids} == {1, 2}
        assert optimizer.num_steps_trained <= 8 * len(learned)
        assert sum(map(sum, added)) == optimizer.num_steps_sampled
        assert [len(shard) for shard in optimizer.shards] == [min(133, sum(counts)) for counts in added]


def test_before_learning_starts_a_step_is_a_round_of_samples():
    with thread_set() as evaluators, apex(evaluators, learning_starts=400) as optimizer:
        for _ in range(3):
            before = optimizer.num_steps_sampled
            assert optimizer.step() == {}
            assert optimizer.num_steps_sampled >= before + 10
        assert evaluators.local.learned == []


def test_errors_go_to_the_rows_of_the_shard_they_came_from():
    options = {"prioritized_replay_alpha": 1.0, "num_replay_buffer_shards": 2, "buffer_size": 100_000}
    with thread_set() as evaluators, apex(evaluators, **options) as optimizer:
        while optimizer.num_updates < 30:
            optimizer.step()
        optimizer.close()
        learned = {int(i) for ids in evaluators.local.learned for i in ids}
        seen = set()
        for shard in optimizer.shards:
            state = shard._buffer.get_state()
            for row, priority in zip(state["columns"]["id"].tolist(), state["priorities"].tolist(), strict=True):
                if row in learned:
                    assert priority == pytest.approx(row + 1e-6)
                    seen.add(row)
        assert seen == learned
        assert optimizer.stats()["num_late_priorities"] == 0


def test_what_waits_is_bounded_and_nothing_drawn_is_dropped():
    def gated(worker_index):
        evaluator = Learner(worker_index)
        evaluator.gate = threading.Semaphore(0) if worker_index == 0 else None
        return evaluator

    with thread_set(make=gated) as evaluators:
        options = {"learner_queue_size": 5, "max_replays_in_flight": 2, "num_replay_buffer_shards": 2}
        optimizer = apex(evaluators, **options, learning_starts=2, max_weight_sync_delay=10**6)
        gate = evaluators.local.gate
        gate.release()
        optimizer.step()
        wait_until(lambda: len(optimizer._queue) == 4)  # 2 shards x 2, less than 5
        assert len(evaluators.local.learned) == 1
        assert optimizer._requests.in_flight() == 4  # 2 evaluators x 2
        threading.Timer(0.0, optimizer.close).start()
        gate.release(100)
        wait_until(lambda: optimizer._threads.stopped)
        optimizer.close()
        assert optimizer.stats()["num_dropped_batches"] == 0
        with pytest.raises(LearnerError, match="closed"):
            optimizer.step()


def test_close_while_everything_is_full_ends_in_time():
    def gated(worker_index):
        evaluator = Learner(worker_index)
        evaluator.gate = threading.Semaphore(0) if worker_index == 0 else None
        return evaluator

    error = []

    def stepping():
        try:
            steps(optimizer, 10_000)
        except LearnerError as e:
            error.append(e)

    with thread_set(make=gated) as evaluators:
        optimizer = apex(evaluators, learner_queue_size=2)
        thread = threading.Thread(target=stepping)
        thread.start()
        wait_until(lambda: len(optimizer._queue) == 2)
        threading.Timer(1.0, evaluators.local.gate.release).start()  # the update that is under way ends
        started = time.monotonic()
        optimizer.close()
        assert time.monotonic() - started < 5
        thread.join(2)
        assert not thread.is_alive()
        assert "closed" in str(error[0])


def test_sampling_waits_below_the_training_intensity():
    most_in_flight = 2 * 2 * 13
    with thread_set() as evaluators, apex(evaluators, training_intensity=4.0, buffer_size=4000) as optimizer:
        while optimizer.num_updates < 60:
            optimizer.step()
            fresh = optimizer.num_steps_sampled - 20
            assert fresh * 4 <= optimizer.num_steps_trained + 4 * most_in_flight
        assert optimizer.num_steps_sampled > 20 + 60 * 8 / 4 - most_in_flight  # and waits no longer than that
        learner = evaluators.local
        learner.gate = threading.Semaphore(0)
        stopper = threading.Timer(0.5, lambda: learner.gate.release(10_000))
        stopper.start()
        before = optimizer.num_steps_sampled
        optimizer.step()  # waits for the learner, with nothing in flight
        stopper.join()
        assert optimizer.num_steps_sampled <= before + 2 * most_in_flight


def test_a_run_that_goes_on_with_empty_shards_samples_first():
    with thread_set() as evaluators, apex(evaluators, training_intensity=100.0) as optimizer:
        optimizer.restore({**optimizer.save(), "num_steps_sampled": 10_000, "num_steps_trained": 50})
        assert not optimizer._is_ahead()  # else the step would wait for a learner that has no rows
        while not optimizer.num_updates:
            optimizer.step()


def test_weights_go_out_by_the_rows_an_evaluator_has_sampled():
    with thread_set(1) as evaluators, apex(evaluators, max_weight_sync_delay=50) as optimizer:
        while optimizer.num_updates < 20 or optimizer.num_steps_sampled < 500:
            optimizer.step()
        assert 1 <= optimizer.num_weight_syncs <= optimizer.num_steps_sampled // 50
        assert evaluators.version <= optimizer.num_weight_syncs + 1


@pytest.mark.parametrize("stored", [True, False])
def test_shards_are_saved_if_wanted(stored):
    options = {"num_replay_buffer_shards": 2, "store_buffer_in_checkpoints": stored}
    with thread_set() as evaluators, apex(evaluators, **options) as optimizer:
        while optimizer.num_steps_sampled < 100:
            optimizer.step()
        state = optimizer.save()  # while the replay thread draws
        assert (state["shards"] is not None) == stored
        optimizer.close()
        state = pickle.loads(pickle.dumps(optimizer.save()))
        kept = [shard._buffer.get_state()["columns"]["id"].tolist() for shard in optimizer.shards]
    with thread_set() as evaluators, apex(evaluators, **options) as resumed:
        resumed.restore(state)
        assert resumed.num_steps_sampled == optimizer.num_steps_sampled
        assert [len(shard) for shard in resumed.shards] == ([len(ids) for ids in kept] if stored else [0, 0])
        if stored:
            assert [shard._buffer.get_state()["columns"]["id"].tolist() for shard in resumed.shards] == kept
        while resumed.num_updates < 1:
            resumed.step()
    if stored:
        with thread_set() as evaluators, apex(evaluators, num_replay_buffer_shards=3) as other:
            with pytest.raises(ConfigError, match="num_replay_buffer_shards=2"):
                other.restore(state)
            assert other.num_steps_sampled == 0


def test_epsilon_per_worker():
    assert [worker_epsilon(i, 3) for i in range(3)] == pytest.approx([0.4, 0.4**4.5, 0.4**8])
    assert worker_epsilon(0, 1) == 0.4
    with EvaluatorSet.create(make_cartpole, 3, InlineEngine(copies=False)) as evaluators:
        optimizer = apex(evaluators, per_worker_exploration=True)
        optimizer.step()
        got = evaluators.foreach_evaluator(lambda e: e.policy.epsilon)
        assert got[1:] == pytest.approx([0.4, 0.4**4.5, 0.4**8])
        optimizer.close()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_conformance(num_shards):
    make = functools.partial(apex, num_replay_buffer_shards=num_shards)
    report = check_optimizer(make, Learner, background=True)
    expected = {**dict.fromkeys(OPTIMIZER_RULES, "ok"), 8: "workers are no processes", 9: "needs remote evaluators"}
    assert report == expected


def test_an_evaluator_is_killed_in_the_middle_of_a_sample():
    engine = functools.partial(ProcessEngine, ProcessSettings(close_timeout_s=1.0))
    assert check_optimizer(apex, RowEvaluator, [8], make_engine=engine, mortal=True, background=True) == {8: "ok"}


def make_cartpole(worker_index):
    def policy(observation_space, action_space, seed):
        settings = DQNSettings(model=ModelSettings(hidden=(8,)), n_step=3, worker_side_prioritization=True)
        return DQNPolicy(observation_space, action_space, settings, seed)

    return CommonPolicyEvaluator("CartPole-v1", policy, 2, worker_index=worker_index, rollout_fragment_length=4)


def test_over_an_env_and_dqn():
    make = functools.partial(apex, per_worker_exploration=True)
    rules = [1, 2, 3, 5]
    assert check_optimizer(make, make_cartpole, rules, background=True) == dict.fromkeys(rules, "ok")


def test_an_error_of_the_replay_thread_comes_out_of_step(monkeypatch):
    with thread_set() as evaluators, apex(evaluators) as optimizer:
        monkeypatch.setattr(optimizer.shards[0], "sample", lambda *_: 1 / 0)
        with pytest.raises(LearnerError, match="replay thread") as caught:
            steps(optimizer, 100)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("options", [{"num_replay_buffer_shards": 0}, {"max_weight_sync_delay": 0}])
def test_impossible_settings(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncReplaySettings(**options)
    with pytest.raises(ConfigError, match="shards"):
        AsyncReplaySettings(buffer_size=3, learning_starts=1, num_replay_buffer_shards=4)


@pytest.mark.parametrize(
    ("ready", "waiting"), [((True, False), [2, 0]), ((True, True), [2, 2]), ((False, True), [0, 2])]
)
def test_no_more_batches_of_a_shard_wait_than_may(ready, waiting):
    class Shard:
        def __init__(self, is_ready):
            self.ready = lambda: is_ready

        def sample(self, num_rows, beta):
            return SampleBatch({"id": np.zeros(num_rows)})

    threads = BackgroundThreads()
    queue = BatchQueue(threads, 100)
    shards = [Shard(one) for one in ready]
    threads.start("replay", lambda: replay_forever(threads, shards, queue, 8, 2, lambda: 0.4, Timers()))
    try:
        with threads.lock:
            assert threads.wait_for(lambda: len(queue) >= sum(waiting), 10)
            assert not threads.wait_for(lambda: len(queue) > sum(waiting), 0.2)
            assert [sum(batch.shard == i for batch in queue) for i in range(2)] == waiting
        queue.take()
        with threads.lock:
            assert threads.wait_for(lambda: len(queue) == sum(waiting), 10)
    finally:
        threads.close()
