"""Waking a sleeping process, and keeping memory writes in order."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import socket
import threading

__all__ = ["STRONG_ORDER", "Doorbell", "Waiter", "fence", "store_barrier"]

STRONG_ORDER = platform.machine() in ("x86_64", "AMD64", "i686", "i386")
"""Whether stores become visible in program order, so that a plain write may publish what was written before it."""

_lock = threading.Lock()


def fence() -> None:
    """Everything written before is visible before anything after is read.

    A lock's atomic instruction is a full fence on x86 (Intel SDM vol. 3, 8.2.5: locked instructions).
    """
    with _lock:  # not acquire and release: Ctrl-C may come between two calls
        pass


def store_barrier() -> None:
    """Everything written before is visible before anything written after; free on x86.

    Elsewhere the release of one lock followed by the acquisition of the next orders the two.
    """
    if not STRONG_ORDER:
        fence()
        fence()


class Doorbell:
    """One process rings, another one's :meth:`wait` returns; rings before the wait count. An eventfd, or a pipe.

    Attributes:
        fds: the descriptors to hand to another process, for ``Doorbell(fds)`` there.
    """

    def __init__(self, fds: tuple[int, ...] | None = None) -> None:
        if fds is None:
            if hasattr(os, "eventfd"):
                fds = (os.eventfd(0, os.EFD_CLOEXEC),)
            else:
                fds = os.pipe()
                os.set_blocking(fds[1], False)
        self.fds = fds
        self.fd, self._other = fds[0], fds[-1]
        self._is_eventfd = len(fds) == 1

    def ring(self) -> None:
        """Wakes the one who waits."""
        if self._is_eventfd:
            os.eventfd_write(self.fd, 1)
        else:
            with contextlib.suppress(BlockingIOError):  # full of rings that nobody has answered
                os.write(self._other, b"\0")

    def wait(self) -> None:
        """Blocks until somebody rings; takes all rings so far."""
        if self._is_eventfd:
            os.eventfd_read(self.fd)
        else:
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        self.fd = self._other = -1  # their numbers may soon be another file's
        while self.fds:
            fd, self.fds = self.fds[0], self.fds[1:]
            os.close(fd)


class Waiter:
    """Waits for a doorbell and for any of several sockets at once."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._names: dict[int, int] = {}
        self._epoll = hasattr(select, "epoll")
        self._poller = select.epoll() if self._epoll else select.poll()
        # edge-triggered: each ring is one event, and nothing has to be read back
        self._poller.register(bell.fd, select.EPOLLIN | select.EPOLLET if self._epoll else select.POLLIN)

    def watch(self, sock: socket.socket, name: int) -> None:
        """From now on :meth:`wait` reports ``name`` when ``sock`` has data or its other end is gone."""
        self._names[sock.fileno()] = name
        self._poller.register(sock.fileno(), select.EPOLLIN if self._epoll else select.POLLIN)

    def unwatch(self, sock: socket.socket) -> None:
        """Forgets a socket; call it before the socket is closed."""
        if self._names.pop(sock.fileno(), None) is not None:
            self._poller.unregister(sock.fileno())

    def wait(self, timeout_s: float) -> list[int]:
        """The names of the sockets that have something; empty after a ring or when the time is over."""
        timeout_s = max(0.0, timeout_s)
        events = self._poller.poll(timeout_s if self._epoll else timeout_s * 1000)
        found: list[int] = []
        if self._epoll and len(events) == 1 and events[0][0] == self._bell.fd:
            return found
        for fd, _ in events:
            if fd != self._bell.fd:
                found.append(self._names[fd])
            elif not self._epoll:
                self._bell.wait()
        return found

    def close(self) -> None:
        """Closes what this opened. Idempotent."""
        if self._epoll:
            self._poller.close()  # type: ignore[union-attr]
