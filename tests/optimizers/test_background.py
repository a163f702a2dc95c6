"""Threads cannot fail unnoticed, and whoever waits is woken."""

import threading

import numpy as np
import pytest

from rlsample.errors import ConfigError, LearnerError
from rlsample.optimizers.background import BackgroundThreads, Stopped, Timers
from rlsample.optimizers.batch_queue import BatchQueue, TrainBatch
from rlsample.optimizers.learner_thread import LearnerThread
from rlsample.optimizers.pass_ring import PassRing


@pytest.fixture
def threads():
    made = BackgroundThreads()
    yield made
    made.close()


def wait_until_stopped(threads):
    with threads.lock, pytest.raises(Stopped):
        threads.wait_for(lambda: False, timeout_s=10)


def test_the_first_failure_ends_all_threads_and_is_the_cause(threads):
    woken = threading.Event()

    def waits_for_ever():
        try:
            with threads.lock:
                threads.wait_for(lambda: False)
        finally:
            woken.set()

    def fails():
        raise FloatingPointError("nan-7")

    threads.start("waiting", waits_for_ever)
    threads.start("failing", fails)
    wait_until_stopped(threads)
    assert woken.wait(10)
    for _ in range(2):  # it stays so
        with pytest.raises(LearnerError, match="the failing thread failed: FloatingPointError: nan-7") as caught:
            threads.check()
        assert isinstance(caught.value.__cause__, FloatingPointError)


@pytest.mark.parametrize("end", [lambda: None, lambda: exec("raise SystemExit(0)")], ids=["returns", "exits"])
def test_a_thread_that_just_ends_is_a_failure(threads, end):
    threads.start("odd", end)
    wait_until_stopped(threads)
    with pytest.raises(LearnerError, match="the odd thread"):
        threads.check()


def test_after_close_there_is_no_failure_but_an_end(threads):
    threads.check()
    threads.close()
    with pytest.raises(LearnerError, match="closed"):
        threads.check()


def test_timers_add_up_over_threads():
    timers = Timers()
    workers = [threading.Thread(target=lambda: [timers.add("fill", 0.5) for _ in range(100)]) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert timers.drain() == {"fill_s": 150.0}
    assert timers.drain() == {}


def batch(make_batch, first, rows=2):
    return TrainBatch((make_batch(first, [rows]),))


def taken(queue, number):
    return [queue.take() for _ in range(number)]


def test_a_queue_keeps_order_and_bound(threads, make_batch):
    queue = BatchQueue(threads, 3)
    batches = [batch(make_batch, 10 * i) for i in range(4)]
    assert [queue.put(b, timeout_s=0.01) for b in batches] == [True, True, True, False]
    assert len(queue) == 3
    assert taken(queue, 3) == [(0, batches[0]), (1, batches[1]), (2, batches[2])]
    assert queue.mean_size() == (0 + 1 + 2 + 3) / 4
    assert queue.mean_size() == 0
    assert (queue.num_dropped_batches, queue.num_dropped_rows) == (0, 0)


def test_a_full_queue_blocks_until_there_is_room(threads, make_batch):
    queue = BatchQueue(threads, 1)
    queue.put(batch(make_batch, 0))
    entered = threading.Event()

    def put():
        entered.set()
        assert queue.put(batch(make_batch, 10), timeout_s=10)

    putting = threading.Thread(target=put)
    putting.start()
    entered.wait()
    assert [number for number, _ in taken(queue, 2)] == [0, 1]
    putting.join()


@pytest.mark.parametrize(("when_full", "kept"), [("drop_oldest", [20, 30]), ("drop_newest", [0, 10])])
def test_dropping_is_counted(threads, make_batch, when_full, kept):
    queue = BatchQueue(threads, 2, when_full)
    assert all(queue.put(batch(make_batch, first, rows)) for first, rows in ((0, 1), (10, 2), (20, 4), (30, 8)))
    assert [int(b.fragments[0]["id"][0]) for _, b in taken(queue, 2)] == kept
    assert (queue.num_dropped_batches, queue.num_dropped_rows) == (2, 3 if when_full == "drop_oldest" else 12)


def test_a_failure_ends_a_put_that_waits(threads, make_batch):
    queue = BatchQueue(threads, 1)
    queue.put(batch(make_batch, 0))

    def fails():
        raise OSError("disk")

    threads.start("failing", fails)
    with pytest.raises(LearnerError, match="disk"):
        queue.put(batch(make_batch, 1))
    for when_full in ("drop_oldest", "drop_newest"):
        with pytest.raises(LearnerError, match="disk"):
            BatchQueue(threads, 1, when_full).put(batch(make_batch, 2))


def test_queues_and_rings_of_nothing_are_refused(threads):
    with pytest.raises(ConfigError, match="learner_queue_size"):
        BatchQueue(threads, 0)
    with pytest.raises(ConfigError, match="drop_oldest"):
        BatchQueue(threads, 1, "drop_olest")
    for items, passes in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="minibatch_buffer_size and num_sgd_iter"):
            PassRing(items, passes, lambda: True, lambda: 0)


class HalfTrained:
    """A source whose loss sees half of each batch, such as devices with equal shares may."""

    def __init__(self, batches):
        self.batches = batches

    def ready(self):
        return bool(self.batches)

    def take(self):
        return self.batches.pop(0)

    def batch_of(self, item):
        return item

    def train(self, item):
        return [{"loss": 1.0}, {"loss": 3.0}], item.count // 2

    def release(self, item):
        pass


def test_progress_is_what_the_source_trained(threads, make_batch):
    batches = [
        TrainBatch((make_batch(0, [8]),), 3, ((8, 0.5, 0),)),
        TrainBatch((make_batch(8, [4]),), 4, ((4, 1.0, 1),)),
    ]
    learner = LearnerThread(threads, HalfTrained(batches))
    learner.start()
    while not learner.between_updates(lambda: not batches):
        pass
    progress = learner.drain()
    assert (progress.num_updates, progress.num_steps_trained, progress.num_steps_replayed) == (4, 6, 3 + 2)
    assert progress.stats == {"loss": 2.0}
    assert progress.lag_mean == pytest.approx(((0 - 0.5) * 8 + (2 - 1.0) * 4) / 12)  # versions 0 and 2 at the start
    assert progress.lag_max == 1
    assert learner.drain().num_updates == 0


def ring_over(items, num_items, num_passes):
    waiting = list(items)
    return PassRing(num_items, num_passes, lambda: bool(waiting), lambda: waiting.pop(0)), waiting


def drained(ring):
    seen = []
    while ring.ready():
        seen.append(ring.next())
    return seen


def test_items_take_turns_and_each_gets_all_its_passes():
    ring, _ = ring_over("abcd", 2, 3)
    seen = drained(ring)
    assert "".join(item for item, _ in seen) == "abababcdcdcd"
    assert [item for item, is_last in seen if is_last] == list("abcd")


def test_without_new_items_the_old_ones_go_on():
    ring, waiting = ring_over("a", 3, 4)
    assert [ring.next()[0] for _ in range(2)] == ["a", "a"]
    waiting.append("b")
    assert "".join(item for item, _ in drained(ring)) == "bababb"
    assert not ring.ready()


def test_statistics_are_means_over_the_updates_that_have_them(threads, make_batch):
    class Odd(HalfTrained):
        def train(self, item):
            many = [{"loss": 1.0, "rare": 5.0}, {"loss": 3}, {"loss": np.float32(5.0)}]
            return (many if item.count == 4 else [{"loss": 3.0, "rare": 1.0}]), item.count

    batches = [TrainBatch((make_batch(0, [4]),)), TrainBatch((make_batch(4, [2]),))]
    learner = LearnerThread(threads, Odd(batches))
    learner.start()
    while not learner.between_updates(lambda: not batches):
        pass
    assert learner.drain().stats == {"loss": 3.0, "rare": 3.0}
