"""Ctrl-C at every place of the process engine where Python may raise it: nothing waits for ever, nothing is misread."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsample.engine import ProcessEngine, ProcessSettings
from rlsample.engine.process_handle import ProcessHandle
from rlsample.errors import WorkerDiedError
from rlsample.testing.engine_probe import Probe
from rlsample.testing.interrupts import interrupted_at

# An interrupt in a finalizer is swallowed there, and told.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SMALL, LARGE = np.arange(7.0), np.arange(50_000.0)  # through the socket; in a shared block
every = pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ProcessEngine]:
    with ProcessEngine(ProcessSettings(close_timeout_s=1.0)) as made:
        yield made


def answer(engine: ProcessEngine, worker: ProcessHandle, value: Any) -> ProcessHandle:
    """The worker, or its replacement, which gives the right answer within ten seconds."""
    for _ in range(2):
        with contextlib.suppress(WorkerDiedError):
            np.testing.assert_array_equal(worker.call("echo", value).result(10), value)
            if worker.alive():  # it may have answered and died at once
                return worker
        worker = engine.replace(worker)
    raise AssertionError("its replacements died, too")


@every
@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
def test_calls_and_waiting(engine: ProcessEngine, tmp_path: Path, value: np.ndarray, step: int):
    workers = [engine.create(functools.partial(Probe, str(tmp_path))) for _ in range(2)]
    workers = [answer(engine, worker, index) for index, worker in enumerate(workers)]
    futures: list[Any] = []

    def ask() -> None:
        for index, worker in enumerate(workers):
            futures.append(worker.call("echo", value + index))
            futures.append(worker.call("echo", value - index))
        engine.wait(list(futures), len(futures), 10)

    place = 0
    while interrupted_at(place, ask):
        place += step
        for future in futures:
            with contextlib.suppress(WorkerDiedError):
                given = future.result(10)
                assert given[1] - given[0] == 1.0
        futures.clear()
        workers = [answer(engine, worker, place) for worker in workers]
    assert place > 100
    assert workers[0].incarnation < place / step  # not at each place does an interrupt cost it its life
    assert [future.result(0)[0] for future in futures] == [0.0, 0.0, 1.0, -1.0]


@every
def test_an_end_that_is_told_and_a_replacement(engine: ProcessEngine, tmp_path: Path, step: int):
    workers = [engine.create(functools.partial(Probe, str(tmp_path))) for _ in range(2)]
    workers = [answer(engine, worker, index) for index, worker in enumerate(workers)]

    def replace_both() -> None:
        asked = [worker.call("echo", 1) for worker in workers]
        assert engine.pump.wait_for(lambda: None not in [worker.pid for worker in workers], 10)
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        for future in asked:
            with contextlib.suppress(WorkerDiedError):
                future.result(10)
        for index, worker in enumerate(workers):
            workers[index] = engine.replace(worker)
            workers[index].call("echo", 2).result(10)

    place, nursery = 0, engine._launcher._nursery
    while interrupted_at(place, replace_both):
        place += step
        workers[:] = [answer(engine, worker, place) for worker in workers]
        assert engine._launcher._nursery is nursery  # it is never lost
    assert place > 200
    assert len(engine._handles) == 2


@every
def test_close(tmp_path: Path, step: int):
    place, goes_on = 0, True
    while goes_on:
        engine = ProcessEngine(ProcessSettings(close_timeout_s=1.0, start_method="fork"))
        worker = engine.create(functools.partial(Probe, str(tmp_path)))
        worker.call("echo", 1).result(10)
        goes_on = interrupted_at(place, engine.close)
        place += step
        started = time.monotonic()
        engine.close()
        assert time.monotonic() - started < 8
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
    assert place > 50


def test_a_thread_that_waits_beside_an_interrupted_one_is_served(engine: ProcessEngine, tmp_path: Path):
    """The interrupted one may have read for it, and then have cost it its worker; never does it wait for ever."""
    mine, its = (engine.create(functools.partial(Probe, str(tmp_path))) for _ in range(2))
    mine, its = answer(engine, mine, 1), answer(engine, its, 2)

    def ask(worker: ProcessHandle, given: list[Any]) -> None:
        try:
            given.append(worker.call("echo", 5).result(10))
        except WorkerDiedError:
            given.append("died")

    place, goes_on, answers = 0, True, []
    while goes_on:
        given: list[Any] = []
        thread = threading.Thread(target=ask, args=(its, given))
        thread.start()
        goes_on = interrupted_at(place, functools.partial(ask, mine, []))
        thread.join(15)
        answers += given
        place += 1
        mine, its = answer(engine, mine, place), answer(engine, its, place)
    assert len(answers) == place > 20
    assert set(answers) <= {5, "died"}
    assert answers.count(5) > place / 2
