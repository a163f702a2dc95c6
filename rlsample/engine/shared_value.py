"""One value for many workers, pickled and copied once."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from rlsample.engine.packing import copy_into, pack, unpack
from rlsample.engine.shared_blocks import Block, BlockPool

__all__ = ["INLINE_MAX_BYTES", "Posts", "SharedValue"]

INLINE_MAX_BYTES = 32 * 1024
"""Up to here the bytes go through the socket, above through shared memory."""


class SharedValue:
    """A frozen copy of a value, such as weights, for ``handle.post``.

    The arrays' bytes are copied once, here, whatever the number of receivers. Each receiver gets containers of its own
    with read-only arrays on the same memory: of this process, or for a process engine shared between the processes.

    Args:
        value: anything that pickles.
        pool: where larger values get their memory; without one: in this process.

    Attributes:
        nbytes: size of the copy.
        block: the shared memory it is in, or None.
    """

    def __init__(self, value: Any, pool: BlockPool | None = None) -> None:
        packed = pack(value)
        self.sizes, self.nbytes = packed.sizes, packed.total
        self.block: Block | None = None
        if pool is not None and packed.total > INLINE_MAX_BYTES:
            self.block = pool.take(packed.total)
            weakref.finalize(self, pool.returned.append, self.block).atexit = False
        self.memory = np.empty(packed.total, np.uint8) if self.block is None else self.block.memory[: packed.total]
        copy_into(self.memory, packed)
        self.memory = self.memory.view()
        self.memory.flags.writeable = False

    def load(self) -> Any:
        """The value, in containers of its own, with read-only arrays."""
        return unpack(self.memory.data, self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedValue, (self.load(),)


class Posts:
    """A handle's posted values that wait: the newest of each name."""

    def __init__(self) -> None:
        self._newest: dict[str, SharedValue] = {}
        self._lock = threading.Lock()

    def put(self, name: str, shared: SharedValue) -> None:
        """Replaces an older one of that name."""
        with self._lock:
            self._newest[name] = shared

    def deliver(self, target: Any) -> None:
        """Calls ``target.name(value)`` for each, once."""
        with self._lock:
            waiting, self._newest = self._newest, {}
        for name, shared in waiting.items():
            getattr(target, name)(shared.load())
