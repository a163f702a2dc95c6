"""A small process that starts an engine's workers, tells how they ended, and takes them along when it goes.

It is the workers' parent for as long as they live, so that the engine may be used from any thread and may be killed:
the kernel ends a worker when its nursery ends (Linux: PR_SET_PDEATHSIG), and the nursery ends when the engine's end of
the socket closes. Elsewhere than on Linux the nursery kills its workers before it goes. It has a session of its own,
where Ctrl-C at the terminal does not reach.

With ``forks`` a worker is a fork of the nursery, which has loaded what the factories need; else a fresh interpreter.

    to the nursery    ("start", key, factory) with a descriptor · ("kill", key)
    from it           ("started", key, pid) · ("ended", key, exit code)
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import marshal
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

__all__ = ["NurseryLink", "fresh_main", "fresh_worker_main", "prctl_die_with_parent", "python_command", "serve"]

_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<Q")
_LOOK_UP_S = 0.25  # how often it looks whether its parent still lives; the socket's end tells sooner, as a rule


class NurseryLink:
    """Small messages (marshalled tuples) with at most one descriptor each."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def send(self, message: tuple[Any, ...], fd: int | None = None) -> None:
        """Sends a message; OSError if the other end is gone."""
        data = marshal.dumps(message)
        data = _HEADER.pack(len(data)) + data
        sent = socket.send_fds(self.sock, [data], [] if fd is None else [fd])
        self.sock.sendall(data[sent:])

    def feed(self) -> list[tuple[Any, ...]]:
        """The messages that are complete after one reading, which waits on a blocking socket.

        Raises:
            EOFError: the other end is gone.
            BlockingIOError: nothing there, on a socket that does not block.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 64)
        except ConnectionResetError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if not data:
            raise EOFError("the other process is gone")
        self._data += data
        found = []
        while len(self._data) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            found.append(marshal.loads(self._data[_HEADER.size : end]))
            del self._data[:end]
        return found

    def take_fd(self) -> int:
        """The oldest descriptor that came."""
        return self._fds.pop(0)


def python_command(function: str, *numbers: int) -> list[str]:
    """The command line of a fresh interpreter with this one's module path: calls ``module.function(*numbers)``."""
    module, _, name = function.rpartition(".")
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}(*map(int, sys.argv[1:]))"
    return [sys.executable, "-c", code, *map(str, numbers)]


def prctl_die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; ends now if ``parent`` is gone."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fresh_main(fd: int, forks: int, parent: int) -> None:
    """The nursery's life in a fresh interpreter."""
    serve(socket.socket(fileno=fd), bool(forks), parent)


def fresh_worker_main(fd: int, parent: int) -> None:
    """A worker's life in a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl_die_with_parent(parent)
    _run_worker(fd)


def serve(sock: socket.socket, forks: bool, parent: int) -> None:
    """Serves until the engine's end of the socket closes or ``parent`` is gone; then ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _Nursery(sock, forks, parent).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _run_worker(fd: int) -> None:
    from rlsample.engine.process_worker import run_worker

    run_worker(socket.socket(fileno=fd))


class _Nursery:
    def __init__(self, sock: socket.socket, forks: bool, parent: int) -> None:
        self.link, self.forks, self.parent = NurseryLink(sock), forks, parent
        self.sock = sock
        self.pids: dict[int, int] = {}  # of the workers that were not reaped
        self.loaded: set[bytes] = set()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self.forks:
            import rlsample.engine.process_worker  # noqa: F401  loaded once, for every fork
        try:
            while os.getppid() == self.parent:
                ready, _, _ = select.select([self.sock.fileno(), self.wake_read], [], [], _LOOK_UP_S)
                if self.wake_read in ready:
                    os.read(self.wake_read, 4096)
                if self.sock.fileno() in ready:
                    for message in self.link.feed():
                        self.handle(message)
                self.reap()
        except (EOFError, OSError):
            pass
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)

    def handle(self, message: tuple[Any, ...]) -> None:
        if message[0] == "start":
            _, key, factory = message
            fd = self.link.take_fd()
            if self.forks:
                self.load(factory)
            self.pids[key] = self.fork(fd) if self.forks and _single_threaded() else self.spawn(fd)
            os.close(fd)
            self.link.send(("started", key, self.pids[key]))
        elif message[1] in self.pids:  # else it was reaped, and its number may be another process by now
            os.kill(self.pids[message[1]], signal.SIGKILL)

    def load(self, factory: bytes) -> None:
        """Unpickles a factory for the modules that loads; an error here is one in the worker too, and told there."""
        digest = hashlib.sha256(factory).digest()
        if digest in self.loaded:
            return
        self.loaded.add(digest)
        # Importing takes seconds; meanwhile this looks after the parent.
        signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == self.parent else os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, _LOOK_UP_S, _LOOK_UP_S)
        try:
            pickle.loads(factory)
        except Exception:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def fork(self, fd: int) -> int:
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            prctl_die_with_parent(nursery)
            self.sock.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            _run_worker(fd)
        finally:
            os._exit(1)  # a child never returns into the nursery's loop

    def spawn(self, fd: int) -> int:
        os.set_inheritable(fd, True)
        command = python_command("rlsample.engine.nursery.fresh_worker_main", fd, os.getpid())
        return os.posix_spawn(command[0], command, os.environ)

    def reap(self) -> None:
        while self.pids:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except OSError as e:
                if e.errno == errno.ECHILD:
                    return
                raise
            if not pid:
                return
            for key, known in list(self.pids.items()):
                if known == pid:
                    del self.pids[key]
                    self.link.send(("ended", key, os.waitstatus_to_exitcode(status)))


def _single_threaded() -> bool:
    """Whether a fork is safe: a library that was loaded may have started threads."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) == 1 if tasks.is_dir() else threading.active_count() == 1
