"""Values without a fixed size (Text, Graph, Sequence, ...): pickled, between the pool and its own workers only.

An observation travels by pipe, ahead of its row, like an info. An action lies in the shared memory file, since the pool
must not wait for a worker to read its pipe while that worker waits for the pool to read the other way.

The columns that hold such values are arrays of objects, each process's own.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from rlsample.env.pool.memory_file import MemoryFile
from rlsample.errors import EnvFailedError, SpaceError
from rlsample.tree import Tree, leaves

__all__ = ["ActionFile", "ObjectLeaves"]


class ObjectLeaves:
    """The leaves of a tree of columns that are arrays of objects; true if there are any."""

    def __init__(self, tree: Tree) -> None:
        self._leaves = [leaf for leaf in leaves(tree) if leaf.dtype.hasobject]

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def pack(self, row: int) -> bytes:
        """The row's values, pickled."""
        return pickle.dumps([leaf[row] for leaf in self._leaves], protocol=5)

    def pack_observation(self, row: int, slot: int, episode_step: int | None) -> bytes:
        """As :meth:`pack`; an EnvFailedError of the slot if a value cannot be pickled."""
        try:
            return self.pack(row)
        except Exception as e:
            failure = EnvFailedError(
                f"slot {slot}: its observation cannot be sent to another process ({type(e).__name__}: {e})",
                slot=slot,
                episode_step=episode_step,
            )
            failure.__cause__ = e
            raise failure from e

    def unpack(self, row: int, data: bytes) -> None:
        """Puts what :meth:`pack` made into a row."""
        for leaf, value in zip(self._leaves, pickle.loads(data), strict=True):
            leaf[row] = value


class ActionFile:
    """The pickled action of each slot, in the pool's memory file. Written while the slot owes nothing.

    Args:
        memory: the file.
        places: int64[N, 2] in shared memory: where each slot's action starts, and its bytes.
    """

    def __init__(self, memory: MemoryFile, places: np.ndarray) -> None:
        self._memory, self._places = memory, places
        self._room = [0] * len(places)

    def write(self, ids: np.ndarray, actions: Tree) -> None:
        """Writes the actions [K, ...] of these slots.

        Raises:
            SpaceError: one cannot be pickled; nothing was written.
        """
        objects, packed = ObjectLeaves(actions), []
        for row, slot in enumerate(ids.tolist()):
            try:
                packed.append((slot, objects.pack(row)))
            except Exception as e:
                what = f"slot {slot}: its action cannot be sent to another process ({type(e).__name__}: {e})"
                raise SpaceError(what) from e
        for slot, data in packed:
            place = self._places[slot]
            if len(data) > self._room[slot]:
                self._room[slot] = 2 * len(data)  # a slot whose actions grow moves seldom
                place[0] = self._memory.extend(self._room[slot])
            self._memory.write(int(place[0]), data)
            place[1] = len(data)

    def read(self, slot: int) -> Any:
        """The bytes of a slot's action, for :meth:`ObjectLeaves.unpack`."""
        start, size = self._places[slot].tolist()
        return self._memory.read(start, size)
