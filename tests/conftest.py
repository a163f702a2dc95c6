"""A test that leaves a thread, a process, shared memory or an open pipe, socket or file behind fails."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rlsample.engine.launcher import Launcher
from rlsample.nursery import nursery_command
from rlsample.testing.held_resources import shared_memory

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs inherit it, and our children would
    signal.signal(signal.SIGINT, signal.default_int_handler)
_PATIENCE_S = 2.0  # what a thread or child may take to vanish after it was asked to end
# A busy machine is slow now and then: how long an example takes, or drawing it, is no fault.
hypothesis.settings.register_profile(
    "any_speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_speed")


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not look at it, and take no quarter of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Nets of these sizes get slower with more threads, most of all beside other jobs."""
    torch = sys.modules.get("torch")
    if torch is None:  # these tests do without, and without the seconds of loading it
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def evaluators_are_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines fork this process where they may: it has loaded torch, which takes a fresh one seconds.

    Not where how they start is the matter; the examples start theirs as users do.
    """
    if request.path.parent.name in ("engine", "slow"):
        yield
        return
    start = Launcher.__init__

    def start_by_fork(self: Launcher, start_method: str, *rest: Any) -> None:
        alone = start_method == "forkserver" and threading.active_count() == 1
        start(self, "fork" if alone else start_method, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "__init__", start_by_fork)
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = _held()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    left = _held() - before
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        left = _held() - before
    assert not left, f"left behind: {sorted(left)}"


_REFUSING = """
import itertools, os
def refusing(real, numbers=itertools.count(1)):
    def call(*args):
        if next(numbers) in {refused}:
            raise OSError({error}, os.strerror({error}))
        return real(*args)
    return call
os.fork, os.posix_spawn = refusing(os.fork), refusing(os.posix_spawn)
"""


@pytest.fixture
def refuse_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Collection[int], int], None]:
    """``refuse_processes(module, {1, 3}, errno)``: a nursery that this module starts gets no first and third worker."""

    def refuse(module: str, refused: Collection[int], error: int) -> None:
        prelude = _REFUSING.format(refused=tuple(refused), error=error)

        def command(*args: Any) -> list[str]:
            python, c, code, *rest = nursery_command(*args)
            return [python, c, prelude + code, *rest]

        monkeypatch.setattr(f"{module}.nursery_command", command)

    return refuse


def _held() -> set[str]:
    return _threads() | _children() | _descriptors() | shared_memory()


def _threads() -> set[str]:
    return {f"thread {t.name} {t.ident}" for t in threading.enumerate()}


def _children() -> set[str]:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return set()
    found = set()
    for task in tasks.iterdir():
        try:
            found |= {f"process {pid}" for pid in (task / "children").read_text().split()}
        except OSError:
            continue  # a thread that ended meanwhile
    return found


def _descriptors() -> set[str]:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return set()
    found = set()
    for fd in folder.iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if not target.startswith(("/dev/null", "/dev/urandom", "/proc/", "/dev/pts")):
            found.add(f"fd {fd.name} -> {target}")
    return found
