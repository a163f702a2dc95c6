"""A small process that starts workers, tells how they ended, and takes them along when it goes.

It is the workers' parent for as long as they live, so that their owner (an engine, a pool of envs) may be used from any
thread and may be killed: the kernel ends a worker when its nursery ends (Linux: PR_SET_PDEATHSIG), and the nursery ends
when the owner's end of the socket closes. Elsewhere than on Linux the nursery kills its workers before it goes. It has
a session of its own, where Ctrl-C at the terminal does not reach.

With ``forks`` a worker is a fork of the nursery, which has loaded what the workers need; else a fresh interpreter.

    to the nursery    ("start", key, factory, plan) with descriptors · ("kill", key)
    from it           ("started", key, pid) · ("refused", key, why) · ("ended", key, exit code)

A worker that the system has no process for is refused; the nursery goes on.

The module of the workers has ``worker_main(plan, fds)``, a worker's life, and ``Preparation()(factory, plan, fds)``,
which the nursery calls before a fork; what it returns is added to that worker's plan. Loads nothing heavy itself.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import marshal
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

__all__ = [
    "NurseryLink",
    "count_threads",
    "die_with_parent",
    "first_message",
    "fresh_main",
    "fresh_worker_main",
    "killer",
    "nursery_command",
    "serve",
    "why_no_process",
]

_PR_SET_PDEATHSIG = 1
_HEADER = struct.Struct("<QQ")
_LOOK_UP_S = 0.25  # how often it looks whether its parent still lives; the socket's end tells sooner, as a rule


def killer(code: int) -> str:
    """What killed a process that ended with this negative exit code: ``SIGKILL``, or ``signal 77``."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def why_no_process(error: OSError) -> str:
    """What the system said when it was asked for another process, and what usually is behind that."""
    hint = {
        errno.EAGAIN: "; too many processes or threads: see ulimit -u, and pids.max of the container's cgroup",
        errno.ENOMEM: "; too little memory for one more: see free -m, the container's limit, vm.overcommit_memory",
    }
    return f"the system gives no process: {error}{hint.get(error.errno or 0, '')}"


class NurseryLink:
    """Small messages (marshalled tuples), each with some descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def send(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        """Sends a message; OSError if the other end is gone."""
        data = marshal.dumps(message)
        data = _HEADER.pack(len(data), len(fds)) + data
        sent = socket.send_fds(self.sock, [data], list(fds))
        self.sock.sendall(data[sent:])

    def feed(self) -> list[tuple[tuple[Any, ...], list[int]]]:
        """The messages that are complete after one reading, each with its descriptors. Waits if the socket blocks.

        Raises:
            EOFError: the other end is gone.
            BlockingIOError, TimeoutError: nothing there, or not in time; what came so far is kept.
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
        while (first := first_message(self._data)) is not None:
            message, num_fds, end = first
            found.append((message, self._fds[:num_fds]))
            del self._data[:end], self._fds[:num_fds]
        return found

    def close(self) -> None:
        """Closes this end, and descriptors of messages that are not complete."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())


def first_message(data: bytes | bytearray) -> tuple[tuple[Any, ...], int, int] | None:
    """The first message in what a link received, its number of descriptors, and its bytes; None: it is not whole."""
    if len(data) < _HEADER.size:
        return None
    size, num_fds = _HEADER.unpack_from(data)
    end = _HEADER.size + size
    return None if len(data) < end else (marshal.loads(data[_HEADER.size : end]), num_fds, end)


def nursery_command(fd: int, forks: bool, worker: str) -> list[str]:
    """The command line of a nursery of this process: its end of the socket, and the module of its workers."""
    return _python_command("fresh_main", fd, int(forks), os.getpid(), worker)


def _python_command(function: str, *arguments: Any) -> list[str]:
    """A fresh interpreter with this one's module path, which calls ``function`` of this module with the texts."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import {function}; {function}(*sys.argv[1:])"
    return [sys.executable, "-c", code, *map(str, arguments)]


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; ends now if ``parent`` is gone.

    Linux: prctl(2), PR_SET_PDEATHSIG. Elsewhere only the latter.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def count_threads() -> int:
    """Threads of this process, those of C libraries included, where the system says."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def fresh_main(fd: str, forks: str, parent: str, worker: str) -> None:
    """The nursery's life in a fresh interpreter."""
    serve(socket.socket(fileno=int(fd)), bool(int(forks)), int(parent), worker)


def fresh_worker_main(worker: str, parent: str, plan: str, *fds: str) -> None:
    """A worker's life in a fresh interpreter; ``plan`` is JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(parent))
    importlib.import_module(worker).worker_main(json.loads(plan), list(map(int, fds)))


def serve(sock: socket.socket, forks: bool, parent: int, worker: str) -> None:
    """Serves until the owner's end of the socket closes or ``parent`` is gone; then ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _Nursery(sock, forks, parent, worker).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class _Nursery:
    def __init__(self, sock: socket.socket, forks: bool, parent: int, worker: str) -> None:
        self.link, self.forks, self.parent, self.worker = NurseryLink(sock), forks, parent, worker
        self.pids: dict[int, int] = {}  # of the workers that were not reaped
        self.prepare: Any = None
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self.forks:  # loaded once, for every fork
            self.prepare = importlib.import_module(self.worker).Preparation()
        poller = select.poll()
        poller.register(self.link.sock, select.POLLIN)
        poller.register(self.wake_read, select.POLLIN)
        try:
            while os.getppid() == self.parent:  # the socket could be held open by another child of the owner
                ready = {fd for fd, _ in poller.poll(_LOOK_UP_S * 1000)}
                if self.wake_read in ready:
                    os.read(self.wake_read, 4096)
                if self.link.sock.fileno() in ready:
                    for message, fds in self.link.feed():
                        self.handle(message, fds)
                self.reap()
        except (EOFError, OSError):
            pass
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)

    def handle(self, message: tuple[Any, ...], fds: list[int]) -> None:
        if message[0] == "start":
            _, key, factory, plan = message
            extra = self.prepared(factory, plan, fds) if self.forks else {}
            try:
                if self.forks and count_threads() == 1:  # else a library that was loaded has started threads
                    self.pids[key] = self.fork({**plan, **extra}, fds)
                else:
                    self.pids[key] = self.spawn(plan, fds)
                answer: tuple[Any, ...] = ("started", key, self.pids[key])
            except OSError as e:
                answer = ("refused", key, why_no_process(e))
            for fd in fds:
                os.close(fd)
            self.link.send(answer)
        elif message[1] in self.pids:  # else it was reaped, and its number may be another process by now
            os.kill(self.pids[message[1]], signal.SIGKILL)

    def prepared(self, factory: bytes, plan: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """What the preparation gives; an error in it is one in the worker too, and told there."""
        # Importing takes seconds; meanwhile this looks after the parent.
        signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == self.parent else os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, _LOOK_UP_S, _LOOK_UP_S)
        try:
            return self.prepare(factory, plan, fds)
        except Exception:
            return {}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def fork(self, plan: dict[str, Any], fds: list[int]) -> int:
        nursery = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(nursery)
            self.link.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            importlib.import_module(self.worker).worker_main(plan, fds)
        finally:
            os._exit(1)  # a child never returns into the nursery's loop

    def spawn(self, plan: dict[str, Any], fds: list[int]) -> int:
        for fd in fds:
            os.set_inheritable(fd, True)
        command = _python_command("fresh_worker_main", self.worker, os.getpid(), json.dumps(plan), *fds)
        return os.posix_spawn(command[0], command, os.environ)

    def reap(self) -> None:
        while self.pids:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for key, known in list(self.pids.items()):
                if known == pid:
                    del self.pids[key]
                    self.link.send(("ended", key, os.waitstatus_to_exitcode(status)))
