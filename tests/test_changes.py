"""Waiting that Ctrl-C leaves whole."""

from __future__ import annotations

import concurrent.futures

import pytest

from rlsample.changes import Changes
from rlsample.testing.interrupts import interrupted_at


def test_after_an_interrupt_at_any_place_the_lock_is_free():
    changes, place = Changes(), 0

    def work() -> None:
        with changes.lock:
            changes.wait_for(lambda: False, 0.02)
            changes.notify_all()

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        while interrupted_at(place, work):
            place += 1
            assert other.submit(changes.lock.acquire, timeout=5).result()
            other.submit(changes.lock.release).result()
    assert place > 10


def test_an_interrupt_is_what_comes_out_of_a_wait(monkeypatch):
    """Also where the lock had just been given up, which the Condition would answer with a RuntimeError."""
    changes = Changes()
    give_up = changes._condition._release_save

    def interrupted():
        give_up()
        raise KeyboardInterrupt

    monkeypatch.setattr(changes._condition, "_release_save", interrupted)
    with pytest.raises(KeyboardInterrupt), changes.lock:
        changes.wait(1.0)
    assert changes.lock.acquire(blocking=False)
    changes.lock.release()
