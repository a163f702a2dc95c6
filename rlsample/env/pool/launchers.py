"""Starting worker processes from the pool's side, and learning how they ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import Any, Protocol

from rlsample.errors import ConfigError, EnvError
from rlsample.nursery import NurseryLink, die_with_parent, nursery_command, why_no_process

__all__ = ["ForkLauncher", "Launcher", "NurseryLauncher", "make_launcher", "refuse_unsafe_fork"]

_WORKER = "rlsample.env.pool.pool_worker"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Launcher(Protocol):
    """Starts processes that run :func:`~rlsample.env.pool.pool_worker.worker_main`."""

    def launch(self, plans: list[dict[str, Any]], fds: list[list[int]]) -> list[int]:
        """Starts one process per plan, which gets copies of its descriptors; returns the process ids."""

    def runs(self, pid: int) -> bool:
        """Whether it has not been seen to end."""

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """What the process ended with (minus the signal that killed it); None: it runs, or nobody knows."""

    def kill(self, pid: int) -> None:
        """Kills the process, if it still runs."""

    def close(self) -> None:
        """Kills what still runs, and waits for that; bounded in time. Idempotent."""


def make_launcher(start_method: str, threads_per_worker: int, start_wait_s: float | None) -> Launcher:
    """The launcher of a start method; nothing is started yet.

    Args:
        start_wait_s: seconds to wait for processes to be there; None: for ever.

    Raises:
        ConfigError: this system cannot, or ``fork`` would not be safe now.
    """
    if sys.platform == "win32":
        raise ConfigError("backend='process' needs Linux or macOS; use backend='inline' on Windows")
    if start_method == "fork":
        refuse_unsafe_fork()
        return ForkLauncher()
    return NurseryLauncher(start_method == "forkserver", threads_per_worker, start_wait_s)


def refuse_unsafe_fork() -> None:
    """Raises ConfigError, which names the reason, if a forked child could inherit a lock that is held for ever."""
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        raise ConfigError(
            f"start_method='fork' is not safe while other threads run ({', '.join(sorted(others))}): the child would "
            "inherit their locks, held for ever; use 'forkserver' or 'spawn', or make the env first"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError("start_method='fork' is not safe once CUDA is in use; use 'forkserver' or 'spawn'")


class NurseryLauncher:
    """Through a nursery process, which is started with the first worker and again if it was lost."""

    def __init__(self, forks: bool, threads_per_worker: int, start_wait_s: float | None = None) -> None:
        self._forks, self._threads, self._start_wait_s = forks, threads_per_worker, start_wait_s
        self._process: subprocess.Popen[bytes] | None = None
        self._link: NurseryLink | None = None
        self._keys = itertools.count()
        self._running: dict[int, int] = {}  # key -> process id
        self._started: dict[int, int] = {}  # the same, of those that are being launched
        self._refused: dict[int, str] = {}  # key -> why, of those too
        self._ended: dict[int, int] = {}  # process id -> exit code

    def launch(self, plans: list[dict[str, Any]], fds: list[list[int]]) -> list[int]:
        for attempt in (1, 2):
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            try:
                return self._launch(plans, fds)
            except TimeoutError as e:
                self.close()
                raise EnvError(
                    f"no worker was started within {self._start_wait_s:g} s: the module that defines the env, or what "
                    "the factory holds, takes too long to load; give a larger step_timeout_s, or None"
                ) from e
            except (EOFError, OSError) as e:
                if attempt == 2:
                    code = self._end()
                    raise EnvError(f"the process that starts workers ended with exit code {code}") from e
        raise AssertionError

    def _start(self) -> None:
        mine, its = socket.socketpair()
        variables = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(self._threads))}
        try:
            self._process = subprocess.Popen(
                nursery_command(its.fileno(), self._forks, _WORKER),
                env=variables, stdin=subprocess.DEVNULL, pass_fds=(its.fileno(),), start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            mine.close()
            raise EnvError(why_no_process(e)) from e
        finally:
            its.close()
        self._link = NurseryLink(mine)

    def _launch(self, plans: list[dict[str, Any]], fds: list[list[int]]) -> list[int]:
        assert self._link is not None
        keys = [next(self._keys) for _ in plans]
        self._started, self._refused = {}, {}
        for key, plan, mine in zip(keys, plans, fds, strict=True):
            self._link.send(("start", key, b"", plan), mine)
        deadline = None if self._start_wait_s is None else time.monotonic() + self._start_wait_s
        try:
            while len(self._started) + len(self._refused) < len(keys):
                self._link.sock.settimeout(None if deadline is None else max(1e-4, deadline - time.monotonic()))
                self._listen(self._link)
        finally:
            self._link.sock.settimeout(None)
        if self._refused:
            for pid in self._started.values():
                self.kill(pid)
            raise EnvError(next(iter(self._refused.values())))
        return [self._started[key] for key in keys]

    def _listen(self, link: NurseryLink) -> None:
        for (kind, key, number), _ in link.feed():
            if kind == "started":
                self._started[key] = self._running[key] = number
                self._ended.pop(number, None)
            elif kind == "refused":
                self._refused[key] = number
            else:
                self._ended[self._running.pop(key)] = number

    def runs(self, pid: int) -> bool:
        return pid in self._running.values()

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while pid not in self._ended and self._link is not None and pid in self._running.values():
            self._link.sock.settimeout(max(1e-4, deadline - time.monotonic()))
            try:
                self._listen(self._link)
            except TimeoutError:
                break
            except (EOFError, OSError):
                self._running.clear()  # the nursery is gone, and the kernel killed its workers
                return None
            finally:
                self._link.sock.settimeout(None)
        return self._ended.get(pid)

    def kill(self, pid: int) -> None:
        if self._link is None:
            return
        for key, running in self._running.items():
            if running == pid:
                with contextlib.suppress(OSError):  # the nursery is gone, and with it its workers
                    self._link.send(("kill", key))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._running.clear()
        self._end()

    def _end(self) -> int | None:
        if self._process is None:
            return None
        process, self._process = self._process, None
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class ForkLauncher:
    """Forks this very process; nothing has to be pickled."""

    def __init__(self) -> None:
        self._ended: dict[int, int | None] = {}
        self._running: set[int] = set()

    def launch(self, plans: list[dict[str, Any]], fds: list[list[int]]) -> list[int]:
        refuse_unsafe_fork()
        pipes = [mine[0] for mine in fds]
        return [
            self._fork(plan, mine, [fd for fd in pipes if fd != mine[0]]) for plan, mine in zip(plans, fds, strict=True)
        ]

    def _fork(self, plan: dict[str, Any], fds: list[int], pipes_of_others: list[int]) -> int:
        from rlsample.env.pool.pool_worker import worker_main

        parent = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of BLAS threads, which mind forks themselves
            try:
                pid = os.fork()
            except OSError as e:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                raise EnvError(why_no_process(e)) from e
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self._running.add(pid)
            return pid
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(parent)
            for fd in pipes_of_others:  # or the pool would not notice that those workers ended
                os.close(fd)
            worker_main(plan, fds)
        finally:
            os._exit(1)

    def runs(self, pid: int) -> bool:
        return pid in self._running

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while pid in self._running:
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
                code: int | None = os.waitstatus_to_exitcode(status)
            except ChildProcessError:  # somebody else has waited for it
                ended, code = pid, None
            if ended:
                self._running.discard(pid)
                self._ended[pid] = code
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(0.001)
        return self._ended.get(pid)

    def kill(self, pid: int) -> None:
        if pid in self._running:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for pid in list(self._running):
            self.kill(pid)
        for pid in list(self._running):
            self.exit_code(pid, 1.0)
