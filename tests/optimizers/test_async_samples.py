"""IMPALA's optimizer: honest counts, bounded hand-offs, errors that arrive, ends that end."""

import functools
import os
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import torch

from rlsample.engine.process_engine import ProcessEngine
from rlsample.engine.thread_engine import ThreadEngine
from rlsample.errors import ConfigError, LearnerError, WorkerDiedError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet, PolicyEvaluator
from rlsample.optimizers.async_samples_optimizer import AsyncSamplesOptimizer, AsyncSamplesSettings
from rlsample.policy import IMPALAPolicy, IMPALASettings, ModelSettings
from rlsample.testing.row_evaluator import RowEvaluator

from .conftest import make_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IDS_PER_WORKER = 1_000_000


class Fake(PolicyEvaluator):
    """Gives rows with ids that count up, as many per sample as the script says; then waits until it is let go."""

    def __init__(self, index, script=(), repeat=True, error=None, learn_error=None):
        self.index, self.script, self.repeat = index, list(script), repeat
        self.error, self.learn_error = error, learn_error
        self.weights, self.calls, self.given = 0, 0, 0
        self.learned, self.gate, self.released = [], threading.Event(), threading.Event()
        self.gate.set()

    def sample(self):
        if self.calls == len(self.script) and not self.repeat:
            if self.error is not None:
                raise self.error
            assert self.released.wait(30)
            return make_batch(0, [])
        rows = self.script[self.calls % len(self.script)]
        self.calls += 1
        batch = make_batch(self.index * IDS_PER_WORKER + self.given, [rows])
        batch["weights_seen"] = np.full(rows, self.weights)
        self.given += rows
        return batch

    def compute_apply(self, samples):
        assert self.gate.wait(30)
        self.learned.append(samples["id"].tolist())
        if self.learn_error and len(self.learned) == self.learn_error[0]:
            raise self.learn_error[1]
        self.weights += 1
        return {"loss": float(self.weights)}

    def compute_gradients(self, samples):
        raise AssertionError("the learner uses compute_apply")

    apply_gradients = compute_gradients

    def get_weights(self):
        return {"w": self.weights}

    def set_weights(self, weights):
        self.weights = weights["w"]

    def close(self):
        self.released.set()


class Run:
    """An optimizer over fakes in threads."""

    def __init__(self, scripts=((5,),), repeat=True, error=None, learn_error=None, **settings):
        self.engine = ThreadEngine()
        self.fakes = {}

        def make(index):
            script = scripts[index - 1] if index else ()
            self.fakes[index] = Fake(index, script, repeat, error if index else None, learn_error)
            return self.fakes[index]

        self.evaluators = EvaluatorSet.create(make, len(scripts), self.engine)
        self.local = self.evaluators.local
        self.optimizer = AsyncSamplesOptimizer(self.evaluators, AsyncSamplesSettings(**settings))

    def close(self):
        for fake in self.fakes.values():
            fake.gate.set()
            fake.released.set()
        self.optimizer.close()
        self.evaluators.close()


@pytest.fixture
def run():
    made = []

    def make(*args, **options):
        made.append(Run(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def step_until(optimizer, done, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, optimizer.stats()
        optimizer.step()


def step_until_error(optimizer):
    for _ in range(10_000):
        optimizer.step()


class Stepping:
    """Steps in a thread until a LearnerError; made once so many rows were sampled."""

    def __init__(self, optimizer, num_rows):
        self._optimizer, self._error = optimizer, None
        self._thread = threading.Thread(target=self._step)
        self._thread.start()
        deadline = time.monotonic() + 10
        while optimizer.num_steps_sampled < num_rows and time.monotonic() < deadline:
            time.sleep(0.01)

    def _step(self):
        try:
            step_until_error(self._optimizer)
        except LearnerError as e:
            self._error = e

    def error(self, limit_s):
        """What it ended with, within the limit."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive()
        return self._error


def test_steps_are_counted_from_the_data_case_24(run):
    """Configured for 10 rows; 7, 13 and 5 come."""
    one = run([(7, 13, 5)], repeat=False, train_batch_size=1)
    step_until(one.optimizer, lambda: one.optimizer.num_steps_trained == 25)
    assert one.optimizer.num_steps_sampled == 25
    assert [[i - IDS_PER_WORKER for i in ids] for ids in one.local.learned] == [
        list(range(7)),
        list(range(7, 20)),
        list(range(20, 25)),
    ]
    assert one.optimizer.num_updates == 3
    assert one.optimizer.stats()["num_steps_replayed"] == 0


def test_fragments_become_train_batches(run):
    one = run([(4,), (4,)], train_batch_size=10, num_sgd_iter=2)
    step_until(one.optimizer, lambda: one.optimizer.num_updates >= 20)
    one.optimizer.close()
    batches = one.local.learned
    assert {len(ids) for ids in batches} == {12}
    assert batches[0::2][:9] == batches[1::2][:9]  # two passes each
    flat = [i for ids in batches[::2] for i in ids]
    assert len(set(flat)) == len(flat)
    for worker in (1, 2):  # nothing in between is missing
        mine = [i % IDS_PER_WORKER for i in flat if i // IDS_PER_WORKER == worker]
        assert mine == list(range(len(mine)))


def test_trained_is_what_the_loss_saw(run):
    one = run([(3,), (5,)], train_batch_size=6, num_sgd_iter=3, replay_proportion=0.5, replay_buffer_num_slots=4)
    step_until(one.optimizer, lambda: one.optimizer.num_updates >= 40)
    one.optimizer.close()
    with pytest.raises(LearnerError):
        one.optimizer.step()  # takes over what was done in the meantime
    optimizer = one.optimizer
    assert optimizer.num_steps_trained == sum(len(ids) for ids in one.local.learned)
    fresh = len({i for ids in one.local.learned for i in ids})
    assert optimizer.num_steps_replayed == pytest.approx(optimizer.num_steps_trained - 3 * fresh, abs=3 * 12)
    assert optimizer.num_steps_replayed > 0
    assert all(len(set(ids)) == len(ids) for ids in one.local.learned)
    assert optimizer.num_steps_sampled >= fresh


def test_weights_reach_the_evaluators_and_the_lag_is_measured(run):
    one = run([(5,)], train_batch_size=5, max_sample_requests_in_flight=1, learner_queue_size=1)
    step_until(one.optimizer, lambda: one.optimizer.num_updates >= 30)
    stats = one.optimizer.stats()
    assert stats["num_weight_syncs"] >= 20
    assert one.fakes[1].weights > 10
    # at most: a batch in the learner's hands, one in the queue, one in step()'s, one being sampled, and one broadcast
    assert 0 < stats["policy_lag_mean"] <= stats["policy_lag_max"] <= 5


def test_a_broadcast_interval_saves_broadcasts(run):
    one = run([(5,)], train_batch_size=5, broadcast_interval=10)
    step_until(one.optimizer, lambda: one.optimizer.num_updates >= 60)
    assert one.evaluators.version <= 1 + one.optimizer.num_steps_sampled / 5 / 10


def test_sampling_waits_for_a_learner_that_is_behind(run):
    one = run([(5,), (5,)], train_batch_size=5, learner_queue_size=3)
    one.local.gate.clear()
    stepping = threading.Thread(target=lambda: one.optimizer.step())
    stepping.start()
    deadline = time.monotonic() + 10
    while one.optimizer.num_steps_sampled < 25 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    # one batch at the learner, three in the queue, one in step()'s hands, and what came with it
    assert 25 <= one.optimizer.num_steps_sampled <= 35
    assert one.fakes[1].given + one.fakes[2].given <= 25 + 2 * 2 * 5
    one.local.gate.set()
    stepping.join(10)
    assert not stepping.is_alive()


@pytest.mark.parametrize("when_full", ["drop_oldest", "drop_newest"])
def test_dropped_batches_are_counted_and_not_trained(run, when_full):
    one = run([(5,)], train_batch_size=5, learner_queue_size=2, when_full=when_full)
    one.optimizer.step()
    one.local.gate.clear()
    stepping = threading.Thread(target=lambda: one.optimizer.step())
    stepping.start()
    deadline = time.monotonic() + 10
    while one.optimizer.stats()["num_dropped_batches"] < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    one.local.gate.set()
    stepping.join(10)
    stats = one.optimizer.stats()
    assert stats["num_dropped_batches"] >= 5
    assert stats["num_dropped_rows"] == 5 * stats["num_dropped_batches"]
    one.optimizer.close()
    learned = [i for ids in one.local.learned for i in ids]
    assert len(set(learned)) == len(learned)
    assert len(learned) <= stats["num_steps_sampled"] - stats["num_dropped_rows"]


def ends_within(seconds, work):
    started = time.monotonic()
    work()
    assert time.monotonic() - started < seconds


def alive():
    return [t.name for t in threading.enumerate() if t.name.startswith("rlsample") and "worker" not in t.name]


def test_a_learner_that_raises_case_26(run):
    one = run([(5,)], train_batch_size=5, learn_error=(3, FloatingPointError("nan-7")))
    started = time.monotonic()
    with pytest.raises(LearnerError, match="nan-7") as caught:
        step_until_error(one.optimizer)
    assert time.monotonic() - started < 10
    assert isinstance(caught.value.__cause__, FloatingPointError)
    assert one.optimizer.num_steps_trained == 10
    ends_within(5, one.optimizer.close)
    assert alive() == []


def test_what_was_done_before_an_error_is_counted(run):
    """The learner fails while step() waits for samples that do not come."""
    one = run([(5, 6, 7)], repeat=False, train_batch_size=5, learn_error=(3, FloatingPointError("nan-7")))
    one.local.gate.clear()
    stepping = Stepping(one.optimizer, 18)
    one.local.gate.set()
    assert "nan-7" in str(stepping.error(10))
    assert one.optimizer.num_steps_trained == 5 + 6


def test_an_evaluator_that_raises_case_26(run):
    one = run([(5,)], repeat=False, error=FloatingPointError("nan-7"), train_batch_size=5)
    started = time.monotonic()
    with pytest.raises(FloatingPointError, match="nan-7"):
        step_until_error(one.optimizer)
    assert time.monotonic() - started < 10
    ends_within(5, one.optimizer.close)
    assert alive() == []


def test_after_an_error_of_an_evaluator_training_can_go_on(run):
    one = run([(5,), (3,)], train_batch_size=4, max_sample_requests_in_flight=1)
    step_until(one.optimizer, lambda: one.optimizer.num_updates >= 3)
    sample, broken = one.fakes[1].sample, [True]

    def sometimes():
        if broken:
            broken.clear()
            raise ValueError("once")
        return sample()

    one.fakes[1].sample = sometimes
    with pytest.raises(ValueError, match="once"):
        step_until_error(one.optimizer)
    given = one.fakes[1].given
    step_until(one.optimizer, lambda: one.fakes[1].given >= given + 20)


class Supported(Fake):
    """A fake that loaders can train."""

    columns = ("id", "obs")
    whole_fragments = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.module = torch.nn.Linear(1, 1)

    def multi_device_support(self):
        return self

    def loss(self, rows):
        assert self.gate.wait(30)
        self.learned.append(rows["id"].tolist())
        loss = self.module(rows["obs"][:, :1]).mean() * 0
        return loss, {"loss": loss}

    def update(self):
        self.weights += 1

    def to(self, device):
        return self


@pytest.fixture
def supported(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Fake", Supported)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("passes", [1, 3])
def test_loaders_bring_every_row_once_per_pass(run, passes):
    one = run([(3,), (4,)], train_batch_size=5, num_sgd_iter=passes, num_data_loader_buffers=2)
    step_until(one.optimizer, lambda: one.optimizer.num_updates >= 30)
    stats = one.optimizer.stats()
    one.optimizer.close()
    flat = [i for ids in one.local.learned[: 30 // passes * passes : passes] for i in ids]
    assert len(set(flat)) == len(flat)
    for worker in (1, 2):
        mine = [i % IDS_PER_WORKER for i in flat if i // IDS_PER_WORKER == worker]
        assert mine == list(range(len(mine)))
    assert {"slot_wait_s", "batch_wait_s", "fill_s", "copy_s", "learner_wait_s", "compute_s"} <= set(stats)
    assert 16 <= stats["bytes_copied_per_row"] <= 16 + 2 * 64


@pytest.mark.usefixtures("supported")
def test_a_loader_that_raises_case_26(run, monkeypatch):
    one = run([(5,)], train_batch_size=5, num_data_loader_buffers=2)
    group, loads = one.optimizer._group, []

    def load(slot, batches):
        loads.append(slot)
        if len(loads) == 3:
            raise FloatingPointError("nan-7")
        return type(group).load(group, slot, batches)

    monkeypatch.setattr(group, "load", load)
    started = time.monotonic()
    with pytest.raises(LearnerError, match=r"loader \d thread failed: FloatingPointError: nan-7") as caught:
        step_until_error(one.optimizer)
    assert time.monotonic() - started < 10
    assert isinstance(caught.value.__cause__, FloatingPointError)
    ends_within(5, one.optimizer.close)
    assert alive() == []


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("buffers", [0, 2])
def test_close_while_everything_is_full_ends(run, buffers):
    one = run([(5,), (5,)], train_batch_size=5, learner_queue_size=2, num_data_loader_buffers=buffers)
    one.local.gate.clear()
    stepping = Stepping(one.optimizer, 20)
    time.sleep(0.2)  # step() waits for room by now
    threading.Timer(0.3, one.local.gate.set).start()  # the update that is under way ends
    ends_within(5, one.optimizer.close)
    assert "closed" in str(stepping.error(2))
    assert alive() == []
    one.optimizer.close()


def test_what_cannot_work_is_refused(run):
    with pytest.raises(ConfigError, match="num_workers to 1 or more"):
        AsyncSamplesOptimizer(EvaluatorSet(Fake(0)))
    one = run()
    with pytest.raises(ConfigError, match="multi_device_support"):
        AsyncSamplesOptimizer(one.evaluators, AsyncSamplesSettings(num_data_loader_buffers=1))
    for options, message in (
        ({"num_data_loader_buffers": 1, "minibatch_buffer_size": 2}, "as many num_data_loader_buffers"),
        ({"devices": ("cpu", "cpu")}, "need data loaders"),
        ({"minibatch_size": 3}, "need data loaders"),
        ({"max_sample_requests_in_flight": 0}, "max_sample_requests_in_flight must be at least 1"),
        ({"when_full": "blok"}, "'block'"),
    ):
        with pytest.raises(ConfigError, match=message):
            AsyncSamplesSettings(**options)


def test_save_and_restore_keep_the_counters(run):
    one = run([(5,)], train_batch_size=5, replay_proportion=1.0, replay_buffer_num_slots=3)
    step_until(one.optimizer, lambda: one.optimizer.num_steps_replayed > 0)
    state = one.optimizer.save()
    two = run([(5,)], train_batch_size=5)
    two.optimizer.restore(state)
    assert two.optimizer.save() == state


def cartpole(index):
    settings = IMPALASettings(model=ModelSettings(hidden=(16,)))
    policy = functools.partial(IMPALAPolicy, settings=settings)
    return CommonPolicyEvaluator(
        "CartPole-v1", policy, num_envs=2, rollout_fragment_length=16, seed=3, worker_index=index
    )


def same_weights(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


LOADERS = {"num_data_loader_buffers": 2}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param(LOADERS, id="loaders", marks=pytest.mark.slow),
        pytest.param({"devices": ("cpu", "cpu"), **LOADERS}, id="two"),
    ],
)
def test_impala_on_processes_and_a_killed_evaluator(options):
    settings = AsyncSamplesSettings(train_batch_size=64, **options)
    with (
        EvaluatorSet.create(cartpole, 2, ProcessEngine()) as evaluators,
        AsyncSamplesOptimizer(evaluators, settings) as optimizer,
    ):
        before = evaluators.local.get_weights()
        step_until(optimizer, lambda: optimizer.num_updates >= 5)
        os.kill(evaluators.remote[0].pid, signal.SIGKILL)
        sampled = optimizer.num_steps_sampled
        step_until(optimizer, lambda: optimizer.num_updates >= 20 and evaluators.num_restarts == 1)
        assert optimizer.num_steps_sampled > sampled
        assert optimizer.num_steps_sampled % 32 == 0
        assert optimizer.num_steps_trained == 64 * optimizer.num_updates
        assert optimizer.num_steps_trained <= optimizer.num_steps_sampled
        stats = optimizer.stats()
        assert stats["evaluator_restarts"] == 1
        assert stats["policy_lag_max"] < optimizer.num_updates
        state = optimizer.between_updates(evaluators.local.get_state)
        assert state["policy"]["version"] >= 20
        assert not same_weights(before, state["policy"]["weights"])
        if optimizer._group is not None:
            optimizer._threads.close()
            weights = optimizer._group.weights_by_device()
            assert all(same_weights(weights[0], other) for other in weights)


def test_the_death_after_the_budget_reaches_step():
    with EvaluatorSet.create(RowEvaluator, 1, ProcessEngine()) as evaluators:
        evaluators.settings = type(evaluators.settings)(max_evaluator_restarts=0)
        with AsyncSamplesOptimizer(evaluators, AsyncSamplesSettings(train_batch_size=32)) as optimizer:
            optimizer.step()
            os.kill(evaluators.remote[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match="max_evaluator_restarts=0"):
                step_until_error(optimizer)
