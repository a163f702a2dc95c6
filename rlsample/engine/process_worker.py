"""The life of a process engine's worker: builds one object and calls its methods until it is told to close."""

from __future__ import annotations

import collections
import hashlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from typing import Any

from rlsample.engine.channel import BUILD, BUILT, CALL, CLOSE, CLOSED, ERROR, POST, RESULT, Channel, Message
from rlsample.engine.failures import pack_exception
from rlsample.engine.shared_blocks import BlockPool

__all__ = ["Preparation", "run_worker", "worker_main"]


class Preparation:
    """What the nursery does before it forks a worker: unpickles its factory, once, for the modules that loads."""

    def __init__(self) -> None:
        self._loaded: set[bytes] = set()

    def __call__(self, factory: bytes, plan: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Nothing is added to the plan."""
        digest = hashlib.sha256(factory).digest()
        if digest not in self._loaded:
            self._loaded.add(digest)
            pickle.loads(factory)
        return {}


def worker_main(plan: dict[str, Any], fds: list[int]) -> None:
    """:func:`run_worker` on the one descriptor."""
    run_worker(socket.socket(fileno=fds[0]))


def run_worker(sock: socket.socket) -> None:
    """Serves until the engine closes the channel or tells it to end; then ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 1
    try:
        _Worker(sock).run()
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # the engine is gone
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Worker:
    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock, BlockPool())
        self.poller = select.poll()
        self.poller.register(sock, select.POLLIN)
        self.object: Any = None
        self.build_error: Any = None
        self.post_error: Any = None
        self.calls: collections.deque[Message] = collections.deque()
        self.posts: dict[str, Message] = {}  # name -> the newest
        self.ending = False

    def run(self) -> None:
        self.build(self.channel.receive())
        while True:
            if not self.calls and not self.ending:
                self.take_in(self.channel.receive())
            while self.channel.has_message or self.poller.poll(0):  # a post overtakes calls that wait
                self.take_in(self.channel.receive())
            self.deliver_posts()
            if self.ending:
                return self.close()
            if self.calls:
                self.answer(self.calls.popleft())

    def take_in(self, message: Message) -> None:
        if message.kind == CALL:
            self.calls.append(message)
        elif message.kind == POST:
            self.posts[message.name] = message
        else:
            assert message.kind == CLOSE
            self.ending = True

    def build(self, message: Message) -> None:
        assert message.kind == BUILD
        try:
            factory, index, incarnation = message.value()
            self.object = pickle.loads(factory)(index, incarnation)
        except Exception as e:
            self.build_error = pack_exception(e)
        self.channel.send(self.channel.frames(BUILT, 0, "", self.build_error))

    def deliver_posts(self) -> None:
        posts, self.posts = self.posts, {}
        for name, message in posts.items():
            try:
                getattr(self.object, name)(message.value())
            except Exception as e:
                self.post_error = self.post_error or pack_exception(e)

    def answer(self, message: Message) -> None:
        failed, self.post_error = self.build_error or self.post_error, None
        if failed is None:
            try:
                value = getattr(self.object, message.name)(*message.value())
                frames = self.channel.frames(RESULT, message.call_id, "", value)
            except Exception as e:
                failed = pack_exception(e)
        if failed is not None:
            frames = self.channel.frames(ERROR, message.call_id, "", failed)
        self.channel.send(frames)

    def close(self) -> None:
        failed = None
        try:
            close = getattr(self.object, "close", None)
            if close is not None:
                close()
        except Exception as e:
            failed = pack_exception(e)
        self.channel.send(self.channel.frames(CLOSED, 0, "", failed))
