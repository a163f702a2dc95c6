"""Blocks of anonymous shared memory: a sender writes into one, a receiver uses the arrays in place.

There is no name that could leak: the kernel frees a block when the last process that maps it is gone.
"""

from __future__ import annotations

import collections
import io
import mmap
import os
import tempfile
import threading
import weakref

import numpy as np

__all__ = ["Block", "BlockPool", "BlockViews"]

_SMALLEST = 1 << 16
_FREE_BLOCKS = 4


class Block:
    """Shared memory that this process made.

    Attributes:
        block_id: unique in its pool.
        file: its descriptor is to be given to the process that shall map it; closed with the object, should Ctrl-C lose
            it.
        memory: uint8 [size], writable here.
        holders: who still reads it; guarded by the pool.
    """

    def __init__(self, block_id: int, num_bytes: int) -> None:
        self.block_id, self.size, self.holders = block_id, num_bytes, 0
        self.file = _anonymous_file()
        self.file.truncate(num_bytes)
        self.memory = np.frombuffer(mmap.mmap(self.file.fileno(), num_bytes), np.uint8)

    def close(self) -> None:
        """Gives up the descriptor and this mapping; views keep their memory."""
        self.file.close()
        self.memory = self.memory[:0].copy()


def _anonymous_file() -> io.FileIO:
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("rlsample", os.MFD_CLOEXEC), "r+")
    with tempfile.TemporaryFile() as file:
        return io.FileIO(os.dup(file.fileno()), "r+")


class BlockPool:
    """The blocks a process sends with; a block that nobody holds is used again. Safe between threads."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.returned: collections.deque[Block] = collections.deque()
        """Finalizers put blocks here: they run anywhere and must not take a lock."""
        self._free: list[Block] = []
        self._next_id = 1
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Block:
        """A block of at least that size, with one holder. Only pages that are written cost memory."""
        with self._lock:
            self._take_returned()
            fitting = [block for block in self._free if block.size >= num_bytes]
            if fitting:
                block = min(fitting, key=lambda b: b.size)
                self._free.remove(block)
            else:
                block = Block(self._next_id, max(_SMALLEST, 1 << (num_bytes - 1).bit_length()))
                self._next_id += 1
                self.blocks[block.block_id] = block
            block.holders = 1
            return block

    def hold(self, block: Block) -> None:
        """One more holder."""
        with self._lock:
            block.holders += 1

    def release(self, block: Block) -> None:
        """One holder less."""
        with self._lock:
            self._release(block)

    def _take_returned(self) -> None:
        while self.returned:
            self._release(self.returned.popleft())

    def _release(self, block: Block) -> None:
        block.holders -= 1
        if block.holders or block.block_id not in self.blocks:
            return
        self._free.append(block)
        if len(self._free) > _FREE_BLOCKS:
            self._drop(self._free.pop(0))

    def _drop(self, block: Block) -> None:
        del self.blocks[block.block_id]
        block.close()

    def close(self) -> None:
        """Gives up every block. Idempotent."""
        with self._lock:
            for block in list(self.blocks.values()):
                self._drop(block)
            self._free.clear()
            self.returned.clear()


class BlockViews:
    """The other process's blocks, mapped here.

    Attributes:
        freed: ids of blocks whose last array is gone: to be told to the sender.
    """

    def __init__(self) -> None:
        self.freed: collections.deque[int] = collections.deque()
        self._maps: dict[int, mmap.mmap] = {}

    def adopt(self, block_id: int, file: io.FileIO) -> None:
        """Maps a block that was not seen before, and closes the file."""
        with file:
            self._maps[block_id] = mmap.mmap(file.fileno(), 0)

    def view(self, block_id: int) -> memoryview:
        """The block's memory. When the last view of it is gone, its id is added to ``freed``."""
        root = np.frombuffer(self._maps[block_id], np.uint8)
        weakref.finalize(root, self.freed.append, block_id).atexit = False  # of each view: a block may have several
        return root.data

    def forget(self, block_id: int) -> None:
        """Unmaps a block the sender gave up; arrays that are still in use keep their memory."""
        self._maps.pop(block_id, None)

    def close(self) -> None:
        """Unmaps all, as far as no array is in use. Idempotent."""
        self._maps.clear()
