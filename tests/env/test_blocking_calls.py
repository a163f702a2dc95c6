"""A thread for calls that block."""

import gc
import queue
import threading
import weakref

from rlsample.env.blocking_calls import BlockingCalls


def test_outcomes_come_in_the_order_of_the_calls():
    outcomes = queue.SimpleQueue()
    calls = BlockingCalls("test", outcomes)
    error = ValueError("no")

    def fail(value):
        raise error

    calls.begin("a", divmod, 7, 2)
    calls.begin("b", fail, 1)
    calls.begin("c", int)
    assert [tuple(outcomes.get(timeout=5)) for _ in range(3)] == [
        ("a", (3, 1), None),
        ("b", None, error),
        ("c", 0, None),
    ]
    calls.end()
    assert calls.join(5.0)


def test_two_of_them_work_at_once_on_one_queue():
    outcomes = queue.SimpleQueue()
    one, two = BlockingCalls("one", outcomes), BlockingCalls("two", outcomes)
    meet = threading.Barrier(2, timeout=5)
    one.begin(1, meet.wait)
    two.begin(2, meet.wait)
    assert sorted(outcomes.get(timeout=5).tag for _ in range(2)) == [1, 2]
    for calls in (one, two):
        calls.end()
        assert calls.join(5.0)


def test_no_thread_without_a_call():
    calls = BlockingCalls("idle", queue.SimpleQueue())
    assert calls.join(0.0)
    assert "idle" not in {t.name for t in threading.enumerate()}


def test_join_gives_up_on_a_call_that_hangs():
    gate = threading.Event()
    calls = BlockingCalls("hangs", queue.SimpleQueue())
    calls.begin(0, gate.wait)
    calls.end()
    assert not calls.join(0.01)
    gate.set()
    assert calls.join(5.0)


def test_nothing_is_kept_after_a_call_and_the_thread_ends_with_its_owner():
    class Big:
        def get(self):
            return 1

    outcomes = queue.SimpleQueue()
    calls, big = BlockingCalls("owned", outcomes), Big()
    dead = weakref.ref(big)
    calls.begin(0, big.get)
    assert outcomes.get(timeout=5).value == 1
    del big
    (thread,) = [t for t in threading.enumerate() if t.name == "owned"]
    for _ in range(1000):
        gc.collect()
        if dead() is None:
            break
        thread.join(0.005)
    assert dead() is None
    del calls
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()
