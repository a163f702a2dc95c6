"""An engine's side of its nursery: starting workers, killing them, learning how they ended."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlsample.engine.pump import Pump
from rlsample.errors import ConfigError, WorkerDiedError
from rlsample.nursery import NurseryLink, first_message, nursery_command, serve, why_no_process

__all__ = ["Launcher", "check_start_method", "check_start_method_name"]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_PATIENCE_S = 1.0
_METHODS = ("forkserver", "spawn", "fork")
_WORKER = "rlsample.engine.process_worker"


def check_start_method_name(start_method: str) -> None:
    """ConfigError if there is no such method."""
    if start_method not in _METHODS:
        raise ConfigError(f"start_method {start_method!r}: must be one of {', '.join(_METHODS)}")


def check_start_method(start_method: str) -> None:
    """ConfigError if this system cannot start workers that way, or ``fork`` would not be safe now."""
    if sys.platform == "win32":
        raise ConfigError("ProcessEngine needs Linux or macOS; use ThreadEngine on Windows")
    check_start_method_name(start_method)
    if start_method != "fork":
        return
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        raise ConfigError(
            f"start_method='fork' is not safe while other threads run ({', '.join(sorted(others))}): a child would "
            "inherit their locks, held for ever; use 'forkserver' or 'spawn', or make the engine first"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError("start_method='fork' is not safe once CUDA is in use; use 'forkserver' or 'spawn'")


class Launcher:
    """Starts the nursery with the first worker, and again if it was lost.

    Args:
        start_method: "forkserver", "spawn" or "fork".
        threads_per_worker: for BLAS and torch; set before they are loaded (not with "fork": they are loaded already).
        pump: tells what the nursery sends.
        on_started: ``(key, pid)``.
        on_ended: ``(key, exit code)``; None: the nursery is gone and took its workers along; a text: why the system had
            no process for it.
    """

    def __init__(
        self,
        start_method: str,
        threads_per_worker: int,
        pump: Pump,
        on_started: Callable[[int, int], None],
        on_ended: Callable[[int, int | str | None], None],
    ) -> None:
        check_start_method(start_method)
        self._method, self._threads, self._pump = start_method, threads_per_worker, pump
        self._on_started, self._on_ended = on_started, on_ended
        self._link: _Link | None = None
        self._nursery: subprocess.Popen[bytes] | _ForkedProcess | None = None
        self._running: set[int] = set()
        self._lost: set[int] = set()  # ended with their nursery, and not told yet
        self._closed = False
        self._lock = threading.Lock()
        if start_method == "fork":
            self._start_nursery()  # while it is safe

    def start(self, key: int, factory: bytes, sock: socket.socket) -> None:
        """Has a worker started that serves ``sock``, which is closed here. It may take a while: see ``on_started``.

        Raises:
            ConfigError: the nursery cannot be started.
            WorkerDiedError: the launcher is closed.
        """
        try:
            with self._lock, sock:
                if self._closed:
                    raise WorkerDiedError("this ProcessEngine is closed")
                for attempt in (1, 2):
                    if self._link is None:
                        self._start_nursery()
                    assert self._link is not None
                    try:
                        self._running.add(key)
                        self._link.send(("start", key, factory, {}), [sock.fileno()])
                        return
                    except OSError as e:
                        self._running.discard(key)
                        self._drop_nursery()
                        if attempt == 2:
                            raise ConfigError(f"the process that starts workers cannot run: {e}") from e
        finally:
            self._tell_lost()

    def _start_nursery(self) -> None:
        check_start_method(self._method)
        mine, its = socket.socketpair()
        try:
            self._link = _Link(mine)
            with its:
                self._nursery = self._make_nursery(mine, its)
            self._pump.register(mine.fileno(), self._read)
        except BaseException as e:
            self._drop_nursery()
            if isinstance(e, OSError):
                raise ConfigError(why_no_process(e)) from e
            raise

    def _make_nursery(self, mine: socket.socket, its: socket.socket) -> subprocess.Popen[bytes] | _ForkedProcess:
        if self._method == "fork":
            return _ForkedProcess(mine, its)
        return subprocess.Popen(
            nursery_command(its.fileno(), self._method == "forkserver", _WORKER),
            env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(self._threads))},
            stdin=subprocess.DEVNULL,
            pass_fds=(its.fileno(),),
            start_new_session=True,
        )

    def _read(self) -> None:
        """Passes on what the nursery tells. Called again if it broke off (Ctrl-C), it goes on where it was."""
        link = self._link
        if link is None or not link.read():
            with self._lock:
                if self._link is link:
                    self._drop_nursery()
            self._tell_lost()
        while link is not None and (message := link.first()) is not None:
            kind, key, number = message
            if kind == "started":
                self._on_started(key, number)
            else:
                self._on_ended(key, number)
                self._running.discard(key)
            link.forget_first()

    def _drop_nursery(self) -> None:
        """Ends the nursery, and thereby its workers, which are to be told as lost when the lock is free."""
        self._lost |= self._running
        if self._link is not None:
            self._pump.unregister(self._link.sock.fileno())
            self._link.close()
            self._link = None
        if self._nursery is not None:
            _end(self._nursery)
            self._nursery = None
        self._running = set()

    def _tell_lost(self) -> None:
        for key in list(self._lost):
            self._on_ended(key, None)
            self._lost.discard(key)

    def kill(self, key: int) -> None:
        """Kills a worker; ``on_ended`` follows. Nothing happens if it has ended."""
        with self._lock:
            if self._link is not None and key in self._running:
                with contextlib.suppress(OSError):  # the nursery is gone, and with it its workers
                    self._link.send(("kill", key))

    def close(self) -> None:
        """Ends the nursery and what still runs; waits for that, bounded in time. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_nursery()
        self._tell_lost()


class _Link(NurseryLink):
    """What the nursery tells is read in one step and kept until it was passed on, so that Ctrl-C loses nothing."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._chunks: collections.deque[bytes] = collections.deque()

    def read(self) -> bool:
        """Takes in what is there now; False: the nursery is gone."""
        try:
            # No bytecode runs, and no KeyboardInterrupt comes, between the kernel and the deque.
            self._chunks.extend(map(self.sock.recv, (1 << 16,), (socket.MSG_DONTWAIT,)))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self._chunks[-1])

    def first(self) -> tuple[Any, ...] | None:
        """The first message, if it is whole."""
        found = first_message(b"".join(self._chunks))
        return None if found is None else found[0]

    def forget_first(self) -> None:
        """It was passed on."""
        data = b"".join(self._chunks)
        found = first_message(data)
        assert found is not None
        self._chunks = collections.deque([data[found[2] :]])


def _end(process: subprocess.Popen[bytes] | _ForkedProcess) -> None:
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_PATIENCE_S)


class _ForkedProcess:
    """A nursery that is a fork of this process, with the part of Popen that is used here."""

    def __init__(self, mine: socket.socket, its: socket.socket) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.setsid()
                mine.close()
                for number in (signal.SIGTERM, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                _limit_torch()
                serve(its, True, parent, _WORKER)
            finally:
                os._exit(1)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return
            except ChildProcessError:  # somebody else has waited for it
                return
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("nursery", timeout_s)
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _limit_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
