"""What only processes can get wrong: deaths, parents that die, signals, threads, shared memory, full sockets."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsample.engine import ProcessEngine, ProcessSettings, SharedValue
from rlsample.errors import ConfigError, WorkerDiedError
from rlsample.testing.engine_probe import Probe

QUICK = ProcessSettings(close_timeout_s=0.5)


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    with ProcessEngine(QUICK) as made:
        yield made


@pytest.fixture
def make_probe(tmp_path: Path) -> Any:
    return functools.partial(Probe, str(tmp_path))


def wait_until(path: Path, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never made"
        time.sleep(0.001)


def test_workers_are_lean(engine: ProcessEngine, make_probe: Any):
    """One thread, one BLAS thread, and no torch unless the factory brings it."""
    worker = engine.create(make_probe)
    found = worker.call("surroundings").result(20)
    assert found == {"threads": 1, "torch": False, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    assert worker.pid is not None
    assert len(os.listdir(f"/proc/{worker.pid}/task")) == 1


def test_workers_ignore_ctrl_c(engine: ProcessEngine, make_probe: Any):
    worker = engine.create(make_probe)
    worker.call("echo", 1).result(20)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    assert worker.call("echo", 2).result(20) == 2


PARENT = """
import functools, os, sys, time
from rlsample.engine import ProcessEngine, ProcessSettings
from rlsample.testing.engine_probe import Probe
engine = ProcessEngine(ProcessSettings(sys.argv[2]))
workers = [engine.create(functools.partial(Probe, sys.argv[1])) for _ in range(2)]
pids = [worker.call("echo", 1).result(20) and worker.pid for worker in workers]
workers[0].call("block", sys.argv[1] + "/never")
bystander = os.fork()  # has all descriptors of its parent, so that no socket closes when that one dies
if not bystander:
    time.sleep(60)
    os._exit(0)
print(*pids, engine._launcher._nursery.pid, bystander, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_workers_end_within_2_s_when_their_parent_is_killed(start_method: str, tmp_path: Path):
    """One is idle, one is in the middle of a call."""
    command = [sys.executable, "-c", PARENT, str(tmp_path), start_method]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        *pids, bystander = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        ends = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
        deadline = time.monotonic() + 2.0
        try:
            left = set(ends)
            while left and time.monotonic() < deadline:
                left -= set(select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))[0])
            assert not left
        finally:
            os.kill(bystander, signal.SIGKILL)
            for fd in ends:
                os.close(fd)


def test_functions_of_main_need_no_import_guard(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("""
import numpy as np
from rlsample.engine import ProcessEngine
class Counter:
    def __init__(self, index, incarnation):
        self.value = 10 * index
    def add(self, function, amount):
        self.value = function(self.value, amount)
        return self, np.full(3, self.value)
def plus(a, b):
    return a + b
engine = ProcessEngine()
worker = engine.create(Counter)
counter, array = worker.call("add", plus, 7).result(20)
print(isinstance(counter, Counter), counter.value, array.tolist())
engine.close()
""")
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "True 7 [7, 7, 7]", out.stderr


def test_the_nursery_is_killed_and_the_engine_goes_on(engine: ProcessEngine, make_probe: Any):
    """Its workers are lost, by name; replacements come from a new one."""
    workers = [engine.create(make_probe) for _ in range(2)]
    assert [w.call("echo", 1).result(20) for w in workers] == [1, 1]
    nursery = engine._launcher._nursery
    assert nursery is not None
    pending = [w.call("block", "/never") for w in workers]
    ends = [os.pidfd_open(w.pid) for w in workers if w.pid is not None]
    os.kill(nursery.pid, signal.SIGKILL)
    for i, future in enumerate(pending):
        with pytest.raises(WorkerDiedError, match=f"worker {i} ended before it answered 'block'"):
            future.result(5)
    for fd in ends:
        assert select.select([fd], [], [], 2.0)[0] == [fd], "a worker outlives its nursery"
        os.close(fd)
    again = engine.replace(workers[1])
    assert again.call("identify").result(20) == (1, 1)


def test_a_worker_that_is_killed_while_others_wait_for_it_in_two_threads(
    engine: ProcessEngine, make_probe: Any, tmp_path
):
    worker, other = engine.create(make_probe), engine.create(make_probe)
    announced, gate = tmp_path / "announced", tmp_path / "gate"
    dying, living = worker.call("announce_and_block", str(announced), str(gate)), other.call("block", str(gate))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            dying.result(20)
        except WorkerDiedError as e:
            errors.append(e)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(announced)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(5)
    assert [str(e) for e in errors] == ["worker 0 was killed by SIGKILL before it answered 'announce_and_block'"] * 2
    assert not living.done()
    gate.touch()
    assert living.result(20) == str(gate)


def test_what_a_worker_answered_before_it_died_counts(engine: ProcessEngine, make_probe: Any):
    """Also if its end is heard of first."""
    worker = engine.create(make_probe)
    worker.call("echo", 1).result(20)
    assert worker.pid is not None
    end = os.pidfd_open(worker.pid)
    answered, unanswered = worker.call("echo", 5), worker.call("exit", 3)
    assert select.select([end], [], [], 20)[0]
    os.close(end)
    while not worker.gone:
        engine._launcher._read()
    assert answered.result(0) == 5
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        unanswered.result(0)


def test_a_thread_that_reads_for_others_hands_their_results_on(engine: ProcessEngine, make_probe: Any, tmp_path: Path):
    worker, other = engine.create(make_probe), engine.create(make_probe)
    assert [w.call("echo", 1).result(20) for w in (worker, other)] == [1, 1]
    slow = worker.call("block", str(tmp_path / "gate"))
    reader = threading.Thread(target=lambda: slow.result(20))
    reader.start()
    while not engine.pump._reading:
        time.sleep(0.001)
    for i in range(20):
        assert other.call("echo", i).result(5) == i
    assert reader.is_alive()
    (tmp_path / "gate").touch()
    reader.join(5)
    assert slow.done()


def stopped(worker: Any) -> None:
    """The worker's process stands still from now on."""
    os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline


def limit_calls(engine: ProcessEngine, call_timeout_s: float | None) -> None:
    """Sets the limit once workers are there: on a busy machine starting one takes longer than a test likes to wait."""
    engine.settings = dataclasses.replace(engine.settings, call_timeout_s=call_timeout_s)
    engine.pump._next_look = 0.0


@pytest.fixture
def hasty(engine: ProcessEngine, make_probe: Any) -> list[Any]:
    """Two workers that may give no sign of life for half a second."""
    workers = [engine.create(make_probe) for _ in range(2)]
    assert [worker.call("echo", 1).result(20) for worker in workers] == [1, 1]
    limit_calls(engine, 0.5)
    return workers


def test_a_worker_that_hangs_is_killed_and_counts_as_dead(engine: ProcessEngine, hasty: list[Any]):
    other, hanging = hasty
    stopped(hanging)
    started = time.monotonic()
    for future in [hanging.call("echo", 2), hanging.call("echo", np.zeros(100_000))]:
        with pytest.raises(WorkerDiedError, match=r"worker 1 gave no sign of life for 0.5 s \(call_timeout_s\)"):
            future.result()  # without a limit of its own
    assert time.monotonic() - started >= 0.5
    assert (hanging.alive(), other.alive()) == (False, True)
    limit_calls(engine, None)
    assert engine.replace(hanging).call("identify").result(20) == (1, 1)
    assert other.call("echo", 3).result(20) == 3


def test_posts_to_a_worker_that_hangs_do_not_wait_for_ever(engine: ProcessEngine, hasty: list[Any]):
    hanging, other = hasty
    stopped(hanging)
    shared = engine.share(np.zeros(1000))
    while hanging.alive():
        hanging.post("keep", shared)
    with pytest.raises(WorkerDiedError, match="no sign of life"):
        hanging.call("echo", 2).result(20)
    limit_calls(engine, None)
    assert other.call("echo", 3).result(20) == 3


def test_nobody_is_killed_for_being_idle_or_read_late(engine: ProcessEngine, hasty: list[Any], tmp_path: Path):
    """What counts is that somebody waits and hears nothing."""
    worker, _ = hasty
    with pytest.raises(TypeError):
        worker.call("echo", threading.Lock())  # never sent
    answered = worker.call("announce_and_block", str(tmp_path / "announced"), str(tmp_path))
    wait_until(tmp_path / "announced")
    time.sleep(0.6)  # longer than the limit, and nobody reads
    assert engine.wait([answered], 1, 20) == ([answered], [])
    time.sleep(0.6)
    assert [handle.alive() for handle in hasty] == [True, True]
    limit_calls(engine, None)
    assert [handle.call("echo", 2).result(20) for handle in hasty] == [2, 2]


def test_calls_that_follow_each_other_are_no_hang(engine: ProcessEngine, hasty: list[Any]):
    """Each is answered within the limit, the last long after it was asked."""
    limit_calls(engine, 1.5)
    futures = [hasty[0].call("doze", 0.4) for _ in range(5)]
    assert [future.result(20) for future in futures] == [0.4] * 5


def test_full_sockets_do_not_lock_up(engine: ProcessEngine, make_probe: Any):
    """600 calls of 20 KB, all sent before a result is read: more than both sockets hold."""
    worker = engine.create(make_probe)
    futures = [worker.call("echo", np.full(2_500, i)) for i in range(600)]
    done, pending = engine.wait(futures, 600, 30)
    assert (done, pending) == (futures, [])
    assert [int(f.result(0)[-1]) for f in futures] == list(range(600))


def test_large_arrays_live_in_blocks_that_are_used_again(engine: ProcessEngine, make_probe: Any):
    worker = engine.create(make_probe)
    for i in range(40):
        got = worker.call("echo", np.full(50_000, i)).result(20)
        assert got.sum() == 50_000 * i
        del got
    assert len(engine.pool.blocks) <= 2
    assert len(worker.channel._views._maps) <= 2


def test_results_that_are_kept_are_never_overwritten(engine: ProcessEngine, make_probe: Any):
    """More of them than blocks may be in use: the rest comes through the socket."""
    worker = engine.create(make_probe)
    kept = [worker.call("echo", np.full(50_000, i)).result(20) for i in range(20)]
    assert [(int(a.min()), int(a.max())) for a in kept] == [(i, i) for i in range(20)]
    assert len(worker.channel._views._maps) == 8
    assert all(a.flags.writeable for a in kept)
    part = kept[0][10:20]
    del kept
    for i in range(20, 60):
        worker.call("echo", np.full(50_000, i)).result(20)
    assert part.tolist() == [0] * 10
    assert len(worker.channel._views._maps) <= 6  # the one in use, and a few that wait to be used again


def test_arrays_outlive_their_worker_and_its_engine(make_probe: Any):
    with ProcessEngine(QUICK) as engine:
        worker = engine.create(make_probe)
        array = worker.call("echo", np.arange(100_000)).result(20)
    assert array.sum() == 99_999 * 50_000


def test_a_shared_value_is_one_block_for_all(engine: ProcessEngine, make_probe: Any):
    workers = [engine.create(make_probe) for _ in range(3)]
    for version in range(10):
        shared = engine.share({"w": np.full(100_000, version)})
        assert shared.block is not None
        for worker in workers:
            worker.post("keep", shared)
        del shared
        assert [int(w.call("give_kept").result(20)["w"][-1]) for w in workers] == [version] * 3
    # Each worker keeps the last one's arrays, and may have told only with its next answer that those before are gone.
    assert len(engine.pool.blocks) <= 3


def test_a_shared_value_stays_while_a_worker_has_it(engine: ProcessEngine, make_probe: Any):
    keeps, other = engine.create(make_probe), engine.create(make_probe)
    keeps.post("keep", engine.share({"w": np.full(100_000, -1)}))
    keeps.call("echo", 1).result(20)
    for version in range(6):
        other.post("keep", engine.share({"w": np.full(100_000, version)}))
        other.call("echo", 1).result(20)
        assert set(keeps.call("give_kept").result(20)["w"].tolist()) == {-1}


def test_a_shared_value_may_be_posted_again_while_it_is_there(engine: ProcessEngine, make_probe: Any):
    worker = engine.create(make_probe)
    for version in range(8):
        shared = engine.share({"w": np.full(100_000, version)})
        for _ in range(3):
            worker.post("keep", shared)
            assert int(worker.call("give_kept").result(20)["w"][-1]) == version
        del shared
    assert len(engine.pool.blocks) <= 3


def test_a_small_shared_value_needs_no_block(engine: ProcessEngine):
    assert engine.share(np.zeros(10)).block is None
    assert SharedValue(np.zeros(10_000)).block is None


def test_what_does_not_pickle_is_refused_at_once(engine: ProcessEngine, make_probe: Any):
    worker = engine.create(make_probe)
    with pytest.raises(TypeError, match="lock"):
        worker.call("echo", threading.Lock())
    with pytest.raises(TypeError, match="lock"):
        engine.create(functools.partial(Probe, threading.Lock()))
    assert worker.call("echo", 1).result(20) == 1


def test_a_result_that_does_not_pickle_is_that_calls_error(engine: ProcessEngine, make_probe: Any):
    worker = engine.create(make_probe)
    with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
        worker.call("give_lock").result(20)
    assert worker.call("echo", 1).result(20) == 1


def test_a_failing_close_comes_out_after_all_have_ended(tmp_path: Path):
    engine = ProcessEngine(QUICK)
    workers = [engine.create(functools.partial(Probe, str(tmp_path / name))) for name in ("missing", ".")]
    assert [w.call("echo", 1).result(20) for w in workers] == [1, 1]
    with pytest.raises(FileNotFoundError, match="closed-0-0"):
        engine.close()
    assert (tmp_path / "closed-1-0").read_text() == "x"
    engine.close()


def test_close_while_workers_are_blocked_on_full_sockets(make_probe: Any):
    engine = ProcessEngine(QUICK)
    workers = [engine.create(make_probe) for _ in range(2)]
    for worker in workers:
        worker.call("echo", 1).result(20)
        for _ in range(60):
            worker.call("echo", np.zeros(2_500))
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5


def test_close_while_a_thread_cannot_get_rid_of_its_calls(make_probe: Any, tmp_path: Path):
    """The worker is busy for longer than close() may take, and its socket is full."""
    engine = ProcessEngine(QUICK)
    worker = engine.create(make_probe)
    busy = worker.call("announce_and_block", str(tmp_path / "announced"), str(tmp_path / "never"))
    wait_until(tmp_path / "announced")
    futures: list[Any] = []

    def call_on() -> None:
        while not futures or not futures[-1].is_set():
            futures.append(worker.call("echo", np.zeros(2_500)))

    thread = threading.Thread(target=call_on)
    thread.start()
    seen = -1
    while len(futures) != seen:  # until a call is stuck
        seen = len(futures)
        time.sleep(0.2)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    thread.join(5)
    assert not thread.is_alive()
    for future in [busy, *futures]:
        with pytest.raises(WorkerDiedError, match="was closed"):
            future.result(0)


@pytest.mark.parametrize(
    "options",
    [{"start_method": "vfork"}, {"threads_per_worker": 0}, {"close_timeout_s": -1.0}, {"call_timeout_s": 0.0}],
)
def test_impossible_settings(options: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ProcessEngine(ProcessSettings(**options))


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize(("number", "hint"), [(errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "too little memory")])
def test_a_process_that_cannot_be_had_is_that_workers_error(
    refuse_processes: Any, make_probe: Any, start_method: str, number: int, hint: str
):
    refuse_processes("rlsample.engine.launcher", {1}, number)
    with ProcessEngine(dataclasses.replace(QUICK, start_method=start_method)) as engine:
        refused, other = engine.create(make_probe), engine.create(make_probe)
        with pytest.raises(WorkerDiedError) as caught:
            refused.call("echo", 1).result(20)
        said = f"worker 0 was never started (the system gives no process: [Errno {number}] {os.strerror(number)}; "
        assert str(caught.value).startswith(said)
        assert hint in str(caught.value)
        assert not refused.alive()
        assert other.call("identify").result(20) == (1, 0)
        assert engine.replace(refused).call("identify").result(20) == (0, 1)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_nursery_that_cannot_be_had_is_an_error_with_its_cause(monkeypatch, make_probe: Any, method: str):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "not now")

    def create() -> None:
        with ProcessEngine(ProcessSettings(method)) as engine:
            engine.create(make_probe)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(os, "fork", refuse)
        with pytest.raises(ConfigError, match=r"no process.*not now.*ulimit -u") as caught:
            create()
    assert isinstance(caught.value.__cause__, BlockingIOError)
