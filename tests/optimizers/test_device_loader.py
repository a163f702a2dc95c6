"""Slots: what is in flight is what was promised, in order, and nobody writes where somebody reads."""

import threading
import time

import numpy as np
import pytest
import torch

from rlsample.errors import LearnerError
from rlsample.optimizers.background import BackgroundThreads, Timers
from rlsample.optimizers.batch_queue import BatchQueue, TrainBatch
from rlsample.optimizers.device_group import DeviceGroup
from rlsample.optimizers.device_loader import DeviceLoader, SlotState
from rlsample.optimizers.learner_thread import LearnerThread, LoadedSource


class Sums:
    """A loss that sums up the rows it sees, twice with a pause between, and keeps the sums."""

    columns = ("id", "obs")
    whole_fragments = False

    def __init__(self):
        self.module = torch.nn.Linear(1, 1)
        self.seen, self.changed = [], 0
        self.gate = threading.Event()
        self.gate.set()

    def loss(self, rows):
        before = rows["id"].clone()
        assert self.gate.wait(20)
        time.sleep(0.001)
        self.changed += not torch.equal(before, rows["id"])
        self.changed += not torch.equal(rows["id"].float(), rows["obs"][:, 0])
        self.seen.append(before.tolist())
        loss = self.module(rows["obs"][:, :1]).mean() * 0
        return loss, {"loss": loss}

    def update(self):
        pass

    def to(self, device):
        return self


class SlowGroup(DeviceGroup):
    """Loads with pauses of different length, so that loaders overtake each other."""

    calls = 0

    def load(self, slot, batches):
        self.calls += 1
        time.sleep(0.004 if self.calls % 3 else 0.0)
        return super().load(slot, batches)


class Pipeline:
    def __init__(self, queue_size, num_slots, num_threads=0, passes=1, ring=1, group=DeviceGroup):
        self.support, self.threads, self.timers = Sums(), BackgroundThreads(), Timers()
        self.queue = BatchQueue(self.threads, queue_size)
        self.group = group(self.support, num_slots=num_slots, timers=self.timers)
        self.loader = DeviceLoader(self.threads, self.queue, self.group, num_slots, num_threads, self.timers)
        source = LoadedSource(self.loader, self.group, 0, 0)
        self.learner = LearnerThread(self.threads, source, None, passes, ring, self.timers)
        self.loader.start()
        self.learner.start()

    def close(self):
        self.threads.close()
        self.group.close()


@pytest.fixture
def pipeline():
    made = []

    def make(*args, **options):
        made.append(Pipeline(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.support.gate.set()
        one.close()


def wait_for_rows(pipeline, rows):
    deadline, trained = time.monotonic() + 30, 0
    while trained < rows and time.monotonic() < deadline:
        if pipeline.learner.wait_for_progress(1.0):
            trained += pipeline.learner.drain().num_steps_trained
    return trained


@pytest.mark.parametrize(("passes", "ring"), [(1, 1), (3, 1), (3, 2)])
def test_no_row_is_lost_doubled_or_changed_in_use(pipeline, make_batch, passes, ring):
    pipe = pipeline(queue_size=3, num_slots=2, num_threads=4, passes=passes, ring=ring, group=SlowGroup)
    batches, first = [], 0
    for rows in (5, 1, 8, 3) * 15:
        batches.append(make_batch(first, [rows]))
        first += rows
    for batch in batches:
        assert pipe.queue.put(TrainBatch((batch,)), timeout_s=20)
    assert wait_for_rows(pipe, first * passes) == first * passes
    assert pipe.support.changed == 0
    ids = [batch["id"].tolist() for batch in batches]
    if ring == 1:  # in order, pass after pass
        assert pipe.support.seen == [part for part in ids for _ in range(passes)]
    else:
        assert sorted(pipe.support.seen) == sorted(part for part in ids for _ in range(passes))
    assert pipe.group.num_rows_loaded == first


@pytest.mark.parametrize(("num_slots", "num_threads"), [(1, 16), (2, 16), (3, 1)])
def test_in_flight_is_queue_plus_slots_whatever_the_threads(pipeline, make_batch, num_slots, num_threads):
    pipe = pipeline(queue_size=4, num_slots=num_slots, num_threads=num_threads)
    pipe.support.gate.clear()  # the learner holds the first batch and gives nothing back
    accepted = 0
    while pipe.queue.put(TrainBatch((make_batch(10 * accepted, [2]),)), timeout_s=0.3):
        accepted += 1
    assert accepted == 4 + num_slots
    states = [slot.state for slot in pipe.loader.slots]
    assert states.count(SlotState.IN_USE) == 1
    assert states.count(SlotState.READY) == num_slots - 1
    pipe.support.gate.set()
    assert wait_for_rows(pipe, 2 * accepted) == 2 * accepted


def test_timers_cover_all_threads_and_bytes_are_counted_once(pipeline, make_batch):
    pipe = pipeline(queue_size=2, num_slots=2, num_threads=2, group=SlowGroup)
    for i in range(20):
        pipe.queue.put(TrainBatch((make_batch(16 * i, [16]),)), timeout_s=20)
    wait_for_rows(pipe, 320)
    times = pipe.timers.drain()
    assert {"slot_wait_s", "batch_wait_s", "fill_s", "copy_s", "learner_wait_s", "compute_s"} == set(times)
    assert times["compute_s"] >= 20 * 0.001
    filled, copied = pipe.group.num_bytes_copied()
    assert (filled, copied) == (320 * (8 + 8), 0)  # one int64 and two float32; on the CPU no second copy


def test_a_loader_that_fails_reaches_the_caller_at_once(pipeline, make_batch):
    pipe = pipeline(queue_size=1, num_slots=1)
    broken = make_batch(0, [3])
    pipe.queue.put(TrainBatch((broken.slice(0, 2), broken.select(np.arange(2), ["obs"]))))
    started = time.monotonic()
    with pytest.raises(LearnerError, match=r"the loader 0 thread failed: ConfigError.*'id'") as caught:
        pipe.learner.wait_for_progress(10)
    assert time.monotonic() - started < 5
    assert caught.value.__cause__ is not None


def test_errands_run_between_updates_and_while_idle(pipeline, make_batch):
    pipe = pipeline(queue_size=4, num_slots=2)
    assert pipe.learner.between_updates(lambda: threading.current_thread().name) == "rlsample learner"
    for i in range(4):
        pipe.queue.put(TrainBatch((make_batch(8 * i, [8]),)))
    assert pipe.learner.between_updates(lambda: pipe.support.gate.is_set())

    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pipe.learner.between_updates(fails)
    assert wait_for_rows(pipe, 32) == 32  # the learner went on
    pipe.threads.stop()
    with pytest.raises(LearnerError, match="closed"):
        pipe.learner.between_updates(lambda: 1)
