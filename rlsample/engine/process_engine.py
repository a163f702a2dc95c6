"""Workers in processes of their own, on this machine.

    with ProcessEngine() as engine:
        worker = engine.create(functools.partial(make_evaluator, "CartPole-v1"))
        batch = worker.call("sample").result(timeout_s=60)

No thread runs here: results are read by whoever waits for one (:class:`~rlsample.engine.pump.Pump`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rlsample.engine.call_future import CallFuture, wait_for_futures
from rlsample.engine.channel import BUILD, BUILT, CLOSE, CLOSED, ERROR, Channel, Frames, Message
from rlsample.engine.engine import Engine, Future, Handle
from rlsample.engine.failures import describe_exit, unpack_exception
from rlsample.engine.launcher import Launcher, check_start_method, check_start_method_name
from rlsample.engine.process_handle import ProcessHandle
from rlsample.engine.pump import Pump
from rlsample.engine.shared_blocks import BlockPool
from rlsample.engine.shared_value import SharedValue
from rlsample.errors import ConfigError, WorkerDiedError, first_of
from rlsample.settings import option

__all__ = ["ProcessEngine", "ProcessSettings"]

log = logging.getLogger(__name__)

_KILL_WAIT_S = 1.0


@dataclass(frozen=True)
class ProcessSettings:
    """Options of :class:`ProcessEngine`."""

    start_method: str = option(
        "forkserver",
        "'forkserver': forks of a clean process that has loaded what the factory needs; 'spawn': a fresh interpreter "
        "each; 'fork': of this process, refused while other threads run",
    )
    threads_per_worker: int = option(1, "threads BLAS and torch may use in a worker")
    close_timeout_s: float = option(2.0, "how long workers may take to close their objects before they are killed")
    call_timeout_s: float | None = option(
        600.0,
        "a worker that is asked something and gives no sign of life for so long is killed and counts as dead; none: "
        "never, for samples that may wait for clients or simulators longer than that",
    )

    def __post_init__(self) -> None:
        check_start_method_name(self.start_method)
        if self.call_timeout_s is not None and not self.call_timeout_s > 0:
            raise ConfigError(f"call_timeout_s must be more than 0 or none, not {self.call_timeout_s}")
        if self.threads_per_worker < 1 or not self.close_timeout_s >= 0:
            raise ConfigError(
                "threads_per_worker must be at least 1 and close_timeout_s at least 0, not "
                f"{self.threads_per_worker} and {self.close_timeout_s}"
            )


class ProcessEngine(Engine):
    """See :class:`~rlsample.engine.engine.Engine`; objects live in processes.

    A worker that dies fails its calls at once with a WorkerDiedError that names its exit code or signal. One that hangs
    is killed after ``call_timeout_s`` by whoever waits for a result then, and its calls fail likewise. Workers end
    within two seconds when this process is killed, and ignore Ctrl-C. Factories and functions go by cloudpickle: those
    of ``__main__`` need no import guard.

    Args:
        settings: see :class:`ProcessSettings`.

    Raises:
        ConfigError: the start method does not work here or now.
    """

    def __init__(self, settings: ProcessSettings | None = None) -> None:
        self.settings = settings or ProcessSettings()
        check_start_method(self.settings.start_method)
        self.pool = BlockPool()
        self.pump = Pump(self._end_hung)
        self._handles: dict[int, ProcessHandle] = {}  # key -> handle, those that are not gone
        self._num_created = self._next_key = 0
        self._closed = False  # nothing is started any more
        self._freed = False  # nothing is left
        self._lock = threading.Lock()  # guards the above
        self._reading = threading.RLock()  # a channel is read, or closed
        self._closing = threading.Lock()
        try:
            self._launcher = Launcher(
                self.settings.start_method, self.settings.threads_per_worker, self.pump, self._started, self._ended
            )
        except BaseException:
            self.pump.close()
            raise

    def create(self, factory: Callable[[int, int], Any]) -> ProcessHandle:
        """See :meth:`Engine.create`.

        Raises:
            TypeError, pickle.PicklingError: the factory does not pickle.
            WorkerDiedError: the engine is closed.
        """
        pickled = cloudpickle.dumps(factory, protocol=5)
        with self._lock:
            index = self._num_created
            self._num_created += 1
        return self._start(index, 0, pickled)

    def replace(self, handle: Handle) -> ProcessHandle:
        """See :meth:`Engine.replace`. The old process is killed."""
        assert isinstance(handle, ProcessHandle)
        self._launcher.kill(handle.key)
        self._drop(handle, "was replaced")
        return self._start(handle.index, handle.incarnation + 1, handle.factory)

    def _start(self, index: int, incarnation: int, pickled: bytes) -> ProcessHandle:
        handle = None
        try:
            with self._lock:
                if self._closed:
                    raise WorkerDiedError("this ProcessEngine is closed")
                mine, its = socket.socketpair()
                mine.setblocking(False)
                handle = ProcessHandle(self, self._next_key, index, incarnation, pickled, mine)
                self._handles[self._next_key] = handle
                self._next_key += 1
            self.pump.register(mine.fileno(), functools.partial(self._read, handle))
            self._launcher.start(handle.key, pickled, its)
            self.send(handle, lambda channel: channel.frames(BUILD, 0, "", (pickled, index, incarnation)))
            return handle
        except BaseException:
            if handle is not None:
                self._launcher.kill(handle.key)
                self._drop(handle, "was never started")
            raise

    def share(self, value: Any) -> SharedValue:
        """See :meth:`Engine.share`; a large value is copied into shared memory."""
        return SharedValue(value, self.pool)

    def wait(
        self, futures: Sequence[Future], num_ready: int = 1, timeout_s: float | None = None
    ) -> tuple[list[Future], list[Future]]:
        return wait_for_futures(self.pump, futures, num_ready, timeout_s)

    # ------------------------------------------------------------------ sending and receiving

    def send(self, handle: ProcessHandle, make_frames: Callable[[Channel], Frames], deadline: float = math.inf) -> None:
        """Sends to a worker, reading from all meanwhile; that a worker is gone shows when it is read from.

        Without a deadline it breaks off when the engine is closed; half a message is the last that was sent then.
        """
        closing = deadline < math.inf
        with handle.send_lock:
            if handle.gone or handle.cut_off or (handle.refuses is not None and not closing):
                return
            frames = None
            try:
                frames = make_frames(handle.channel)
                while frames.pieces and time.monotonic() < deadline:
                    if handle.refuses is not None and not closing:
                        handle.cut_off = True
                        return
                    try:
                        frames = handle.channel.send_some(frames)
                    except BlockingIOError:
                        self._wait_for_room(handle)
                    except OSError:
                        return
            except BaseException as e:
                if frames is not None or not isinstance(e, Exception):  # else it does not pickle: nothing was sent
                    handle.cut_off = True  # Ctrl-C, as a rule: it waits for the other half, or missed what frames told
                    self._launcher.kill(handle.key)
                raise
            with handle.lock:
                handle.stop_waiting()

    def _wait_for_room(self, handle: ProcessHandle) -> None:
        """A few milliseconds at most, in which others are read."""
        with handle.lock:
            handle.start_waiting()
        with contextlib.suppress(ValueError, OSError):  # its socket was closed meanwhile
            writable = select.poll()  # unlike select() it takes descriptors beyond 1023
            writable.register(handle.channel.sock, select.POLLOUT)
            writable.poll(5)
        self.pump.poll()

    def _read(self, handle: ProcessHandle) -> None:
        """Takes in what a worker sent; one whose messages cannot be read is killed.

        Broken off (Ctrl-C), it leaves ``handle.reading`` set: half a message may be lost, and with it the place where
        the next begins. The pump calls again.
        """
        with self._reading:
            if handle.gone:
                return
            with contextlib.suppress(EOFError, OSError):
                if not handle.reading and self._take_all(handle):
                    return
            self.pump.unregister(handle.channel.sock.fileno())
            self._launcher.kill(handle.key)  # its end will be told with the exit code

    def _take_all(self, handle: ProcessHandle) -> bool:
        handle.reading = True
        try:
            for message in handle.channel.feed():
                self._take(handle, message)
        except (EOFError, OSError):
            raise
        except Exception as e:
            log.error("worker %d sent what cannot be read: %r", handle.index, e)
            return False
        with handle.lock:
            handle.stop_waiting(sign_of_life=True)
        handle.reading = False
        return True

    def _take(self, handle: ProcessHandle, message: Message) -> None:
        if message.kind == BUILT:
            handle.build_failed = message.value() is not None
        elif message.kind == CLOSED:
            failed = message.value()
            handle.close_error = failed and unpack_exception(failed)
        else:
            future = handle.pending.get(message.call_id)
            if future is not None:  # else the engine is being closed
                _settle(future, message)
            with handle.lock:  # only now: if this breaks off, the future fails with the worker
                handle.pending.pop(message.call_id, None)

    def _started(self, key: int, pid: int) -> None:
        handle = self._handles.get(key)
        if handle is not None:
            handle.pid = pid

    def _ended(self, key: int, how: int | str | None) -> None:
        handle = self._handles.get(key)
        if handle is None:
            return
        self._read(handle)  # what it sent before it ended counts
        ending = f"was never started ({how})" if isinstance(how, str) else describe_exit(how)
        if not self._closed:
            log.info("worker %d (process %s) %s", handle.index, handle.pid, ending)
        self._drop(handle, ending)

    def _end_hung(self) -> float:
        """Kills workers that gave no sign of life for too long; returns the seconds until it has to look again.

        The pump has just read all that arrived: an answer that lay unread for long is no hang.
        """
        limit = self.settings.call_timeout_s
        if limit is None or self._closed:
            return math.inf
        with self._lock:
            handles = list(self._handles.values())
        now, next_look = time.monotonic(), limit
        for handle in handles:
            since = handle.waited_for_since
            if since is None:
                continue
            if now - since < limit:
                next_look = min(next_look, since + limit - now)
                continue
            log.warning("worker %d (process %s) hangs; it is killed", handle.index, handle.pid)
            self._launcher.kill(handle.key)
            self._drop(handle, f"gave no sign of life for {limit:g} s (call_timeout_s) and was killed")
        return next_look

    def _drop(self, handle: ProcessHandle, why: str) -> None:
        with self._reading:
            handle.gone = True
            self.pump.unregister(handle.channel.sock.fileno())
            handle.channel.close()
        handle.refuse(why)
        with self._lock:
            self._handles.pop(handle.key, None)  # last: whatever broke off before it is done again
        self.pump.wake()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Closes every object and ends its process; one that takes longer than ``close_timeout_s`` is killed.

        Idempotent; called again after Ctrl-C it does the rest.

        Raises:
            Exception: the first that an object's ``close`` raised, which names the others; everything has ended then.
        """
        with self._closing:
            if self._freed:
                return
            with self._lock:
                self._closed = True
                handles = list(self._handles.values())
            for handle in handles:
                handle.refuse("was closed")
            self.pump.wake()
            deadline = time.monotonic() + self.settings.close_timeout_s
            for handle in handles:
                self.send(handle, lambda channel: channel.frames(CLOSE, 0, "", None), deadline)
            self.pump.wait_for(lambda: not self._handles, max(0.0, deadline - time.monotonic()))
            for handle in list(self._handles.values()):
                log.warning("worker %d was still busy when its engine was closed; it is killed", handle.index)
                self._launcher.kill(handle.key)
            self.pump.wait_for(lambda: not self._handles, _KILL_WAIT_S)
            self._launcher.close()
            for handle in list(self._handles.values()):
                self._drop(handle, "was closed")
            self.pump.close()
            self.pool.close()
            self._freed = True
        failed = [(f"worker {h.index}", h.close_error) for h in handles if h.close_error is not None]
        if failed:
            raise first_of(failed)


def _settle(future: CallFuture, message: Message) -> None:
    try:
        value = message.value()
    except Exception as e:
        future.fail(TypeError(f"the result of {future.name!r} cannot be unpickled here: {e!r}"))
        return
    if message.kind == ERROR:
        future.fail(unpack_exception(value))
    else:
        future.resolve(value)
