"""What travels over a pipe between the pool and its workers: whole pickled messages, between our own processes only."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import traceback
from typing import Any

from rlsample.errors import EnvFailedError

__all__ = ["Channel", "RemoteTraceback", "framed", "pack_failure", "unpack_failure"]

_HEADER = struct.Struct("<Q")


class Channel:
    """Messages over one end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._start_over()

    def _start_over(self) -> None:
        self._header = bytearray(_HEADER.size)
        self._body: bytearray | None = None
        self._got = 0

    def send(self, message: Any) -> None:
        """Sends one message; blocks while the other side's buffer is full.

        Raises:
            OSError: the other end is gone.
        """
        self.sock.sendall(framed(message))

    def send_some(self, data: memoryview, timeout_s: float) -> int:
        """Sends as much of ``data`` (part of a framed message) as there is room for; returns how many bytes.

        Waits until there is room for some, or something to receive, or the time is over.

        Raises:
            OSError: the other end is gone.
        """
        poller = select.poll()
        poller.register(self.sock, select.POLLIN | (select.POLLOUT if data else 0))
        room = any(event & select.POLLOUT for _, event in poller.poll(timeout_s * 1000))
        return self.sock.send(data) if room else 0

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            EOFError: the other end is gone, possibly in the middle of a message.
            TimeoutError: the socket's timeout passed; the next call goes on where this one stopped.
        """
        if self._body is None:
            self._fill(self._header)
            self._body, self._got = bytearray(_HEADER.unpack(self._header)[0]), 0
        body = self._body
        self._fill(body)
        self._start_over()
        return pickle.loads(body)

    def look(self) -> str:
        """``message`` if there is something to receive, ``end`` if the other end is gone, else ``nothing``."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        if not poller.poll(0):
            return "nothing"
        try:
            return "message" if self.sock.recv(1, socket.MSG_PEEK) else "end"
        except OSError:
            return "end"

    def _fill(self, data: bytearray) -> None:
        view = memoryview(data)
        while self._got < len(data):
            try:
                count = self.sock.recv_into(view[self._got :])
            except ConnectionResetError:
                count = 0
            if not count:
                raise EOFError("the other process is gone")
            self._got += count

    def close(self) -> None:
        """Closes this end. Idempotent."""
        self.sock.close()


def framed(message: Any) -> bytes:
    """A message as :meth:`Channel.send` sends it."""
    data = pickle.dumps(message, protocol=5)
    return _HEADER.pack(len(data)) + data


class RemoteTraceback(Exception):
    """The cause of an error that happened in another process; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_failure(failure: EnvFailedError) -> tuple[Any, ...]:
    """A failure and its cause as plain values; a cause that does not survive pickling leaves its traceback only."""
    cause: Any = failure.__cause__
    text = "".join(traceback.format_exception(failure if cause is None else cause))
    packed: bytes | None = None
    if cause is not None:
        try:
            packed = pickle.dumps(cause)
            pickle.loads(packed)
        except Exception:
            packed = None
    return str(failure), failure.slot, failure.episode_step, text, packed


def unpack_failure(packed: tuple[Any, ...]) -> EnvFailedError:
    """The failure again: ``__cause__`` is the original exception, its cause in turn the remote traceback."""
    message, slot, episode_step, text, pickled = packed
    failure = EnvFailedError(message, slot=slot, episode_step=episode_step, remote_traceback=text)
    failure.__cause__ = RemoteTraceback(text)
    if pickled is not None:
        try:
            cause = pickle.loads(pickled)
        except Exception:  # its class cannot be loaded here
            return failure
        cause.__cause__ = failure.__cause__
        failure.__cause__ = cause
    return failure
