"""Messages between an engine and its worker process, over a socket pair and shared blocks.

Copies of an array's bytes, from the object that is sent to the array that arrives:
up to 32 KiB per message three, into the socket, out of it, and from a read-ahead buffer; above that one, by the sender
into a shared block, whose memory the arrays that arrive are. While eight blocks are still in use by arrays that came
earlier (the receiver keeps them), larger messages go through the socket too, in two copies.

    header    bytes of the envelope, number of descriptors, bytes of the payload
    envelope  marshalled: kind, call id, name, sizes of the parts, block (0: payload follows), freed and lost blocks
    payload   laid out as in packing.py
"""

from __future__ import annotations

import array
import collections
import io
import itertools
import marshal
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rlsample.engine.packing import Packed, copy_into, pack, unpack
from rlsample.engine.shared_blocks import Block, BlockPool, BlockViews
from rlsample.engine.shared_value import INLINE_MAX_BYTES, SharedValue

__all__ = ["BUILD", "BUILT", "CALL", "CLOSE", "CLOSED", "ERROR", "POST", "RESULT", "Channel", "Frames", "Message"]

BUILD, CALL, POST, CLOSE = 1, 2, 3, 4  # to the worker
BUILT, RESULT, ERROR, CLOSED = 5, 6, 7, 8  # from it

_HEADER = struct.Struct("<IIQ")
_MAX_BLOCKS = 8
_MAX_PARTS = 200  # of one sendmsg
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_READ_AHEAD = 1 << 16
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Frames(NamedTuple):
    """A message ready to be sent: its bytes in pieces, and descriptors that go with the first."""

    pieces: list[memoryview]
    fds: list[int]


class Message:
    """A message that arrived; its value is unpickled on demand.

    Attributes:
        kind: one of the module's constants.
        call_id: which call it belongs to.
        name: of the method, for CALL and POST.
    """

    def __init__(self, kind: int, call_id: int, name: str, sizes: tuple[int, ...], payload: memoryview) -> None:
        self.kind, self.call_id, self.name = kind, call_id, name
        self._sizes = sizes
        self._payload: memoryview | None = payload

    def value(self) -> Any:
        """The value; its arrays live in the message's memory. Ask once."""
        payload, self._payload = self._payload, None
        assert payload is not None
        return unpack(payload, self._sizes)


class Channel:
    """One end. Either side may send at any time; one thread at a time may receive.

    Args:
        sock: of a socket pair (AF_UNIX). Blocking for :meth:`send` and :meth:`receive`, else for :meth:`feed`.
        pool: the blocks to send with; may be shared by the channels of one process.
    """

    def __init__(self, sock: socket.socket, pool: BlockPool) -> None:
        self.sock, self._pool = sock, pool
        self._held: dict[int, list[Block]] = {}  # what the other side has, once per message
        self._known: set[int] = set()
        self._views = BlockViews()
        self._files: collections.deque[io.FileIO] = collections.deque()
        self._messages: collections.deque[Message] = collections.deque()
        self._reader = self._read()
        self._wanted = next(self._reader)
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ sending

    def frames(self, kind: int, call_id: int, name: str, value: Any) -> Frames:
        """Pickles a value now; a large one's arrays are copied into a block, a small one's when they are sent.

        Frames have to be sent, whole and in the order in which they were made.
        """
        packed = pack(value)
        with self._lock:
            if packed.total <= INLINE_MAX_BYTES or len(self._held) >= _MAX_BLOCKS:
                return self._with_envelope((kind, call_id, name, packed.sizes), None, _pieces(packed), packed.total)
            block = self._pool.take(packed.total)
            copy_into(block.memory, packed)
            return self._with_envelope((kind, call_id, name, packed.sizes), block, [], 0)

    def shared_frames(self, name: str, shared: SharedValue) -> Frames:
        """A POST of a value that is in memory already; where that is a block of the pool no byte is copied."""
        with self._lock:
            if shared.block is None:
                return self._with_envelope((POST, 0, name, shared.sizes), None, [shared.memory.data], shared.nbytes)
            self._pool.hold(shared.block)
            return self._with_envelope((POST, 0, name, shared.sizes), shared.block, [], 0)

    def _with_envelope(self, start: tuple[Any, ...], block: Block | None, payload: list[Any], num_bytes: int) -> Frames:
        fds: list[int] = []
        if block is not None:
            self._held.setdefault(block.block_id, []).append(block)
            if block.block_id not in self._known:
                self._known.add(block.block_id)
                fds.append(block.file.fileno())
        gone = tuple(i for i in self._known if i not in self._pool.blocks)
        self._known.difference_update(gone)
        freed = tuple(self._views.freed.popleft() for _ in range(len(self._views.freed)))
        envelope = marshal.dumps((*start, 0 if block is None else block.block_id, freed, gone))
        header = _HEADER.pack(len(envelope), len(fds), num_bytes)
        return Frames([memoryview(header + envelope), *payload], fds)

    def send(self, frames: Frames) -> None:
        """Sends it all; blocks while the other side does not read.

        Raises:
            OSError: the other end is gone.
        """
        while frames.pieces:
            frames = self.send_some(frames)

    def send_some(self, frames: Frames) -> Frames:
        """Sends what the socket takes now and returns the rest.

        Raises:
            BlockingIOError: nothing, on a socket that does not block.
            OSError: the other end is gone.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frames.fds))] if frames.fds else []
        sent = self.sock.sendmsg(frames.pieces, ancillary)
        rest = frames.pieces
        while rest and sent >= len(rest[0]):
            sent -= len(rest[0])
            rest = rest[1:]
        if rest and sent:
            rest = [rest[0][sent:], *rest[1:]]
        return Frames(rest, [])

    # ------------------------------------------------------------------ receiving

    def receive(self) -> Message:
        """The next message; waits for it (on a blocking socket).

        Raises:
            EOFError: the other end is gone.
        """
        while not self._messages:
            self._receive_some()
        return self._messages.popleft()

    @property
    def has_message(self) -> bool:
        """Whether :meth:`receive` returns at once."""
        return bool(self._messages)

    def feed(self) -> list[Message]:
        """All messages that are there now (on a socket that does not block).

        Raises:
            EOFError: the other end is gone, and everything it sent was given out.
        """
        try:
            while self._receive_some():
                pass
        except BlockingIOError:
            pass
        except EOFError:
            if not self._messages:
                raise
        found = list(self._messages)
        self._messages.clear()
        return found

    def _receive_some(self) -> bool:
        """Reads once, as much as there is; whole messages go to the list. Whether there may be more to read now.

        Small pieces are read together into a buffer, and copied from there: a system call costs more than the copy.
        """
        direct = len(self._wanted) >= len(self._ahead)
        target = self._wanted if direct else self._ahead
        try:
            got, ancillary, _, _ = self.sock.recvmsg_into([target], _FD_SPACE, _CLOEXEC)
        except (ConnectionResetError, BrokenPipeError):
            got, ancillary = 0, []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                # In one step, for Ctrl-C: until it is in a file object nobody closes a descriptor.
                self._files.extend(map(io.FileIO, array.array("i", data), itertools.repeat("r+")))
        if not got:
            raise EOFError("the other process is gone")
        if direct:
            self._fill(got)
        else:
            arrived = target[:got]
            while len(arrived):
                part = min(len(arrived), len(self._wanted))
                self._wanted[:part] = arrived[:part]
                arrived = arrived[part:]
                self._fill(part)
        return bool(ancillary) or got == len(target)  # the kernel ends a reading where descriptors come

    def _fill(self, count: int) -> None:
        """``count`` bytes of what is wanted are there."""
        self._wanted = self._wanted[count:]
        while not len(self._wanted):
            self._wanted = next(self._reader)

    def _read(self) -> Iterator[memoryview]:
        """Yields the memory to fill next: header, envelope, payload, and again."""
        while True:
            header = bytearray(_HEADER.size)
            yield memoryview(header)
            size, num_fds, num_bytes = _HEADER.unpack(header)
            envelope = bytearray(size)
            yield memoryview(envelope)
            kind, call_id, name, sizes, block_id, freed, gone = marshal.loads(envelope)
            for number in gone:
                self._views.forget(number)
            for number in freed:
                self._pool.release(self._take_held(number))
            for _ in range(num_fds):
                self._views.adopt(block_id, self._files.popleft())
            if block_id:
                payload = self._views.view(block_id)
            else:
                payload = np.empty(num_bytes, np.uint8).data
                yield payload
            if kind == POST:
                payload = payload.toreadonly()  # others may read the same memory
            self._messages.append(Message(kind, call_id, name, sizes, payload))

    def _take_held(self, block_id: int) -> Block:
        with self._lock:
            blocks = self._held[block_id]
            block = blocks.pop()
            if not blocks:
                del self._held[block_id]
            return block

    def close(self) -> None:
        """Closes this end; blocks the other side had may be used again. Idempotent, also after it broke off."""
        self.sock.close()
        with self._lock:
            while self._held:
                for block in self._held.popitem()[1]:
                    self._pool.release(block)
        while self._files:
            self._files.popleft().close()
        self._views.close()


def _pieces(packed: Packed) -> list[Any]:
    """The parts with padding between; many small ones are joined (a copy)."""
    if len(packed.parts) > _MAX_PARTS:
        joined = np.empty(packed.total, np.uint8)
        copy_into(joined, packed)
        return [joined.data]
    pieces: list[Any] = []
    ends = [*packed.offsets[1:], packed.total]
    for part, size, offset, end in zip(packed.parts, packed.sizes, packed.offsets, ends, strict=True):
        if size:
            pieces.append(part)
        if end > offset + size:
            pieces.append(_ZEROS[: end - offset - size])
    return pieces


_ZEROS = memoryview(bytes(64))
