"""One anonymous region of memory, shared by the pool and its workers.

    control     one line of 64 bytes for all, then one per worker; mapped before any env is built
    slots       per-slot columns, every array on a 64-byte boundary; mapped once the spaces are known

The region has no name: when the last process that maps it ends, however it ends, the memory is gone.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import gymnasium
import numpy as np

from rlsample.env.columns import LeafSpec, leaf_spec
from rlsample.env.pool.memory_file import MemoryFile
from rlsample.env.pool.pickled_values import ObjectLeaves
from rlsample.tree import Tree, gather, map_tree

__all__ = [
    "CLOSING",
    "ENDED_BY",
    "FIRST",
    "HAS_INFO",
    "IS_FAILED",
    "MAIL",
    "NEED",
    "OBJECTS",
    "PARKED",
    "PROGRESS",
    "RESET",
    "RESTART",
    "ROW",
    "STEP",
    "TERMINATED",
    "TRUNCATED",
    "WAKES",
    "ControlLines",
    "LocalPlane",
    "Plane",
    "SlotBlock",
]

_LINE: Final = 8  # int64s of a cache line

# the common line
NEED: Final = 0  # rows the pool sleeps for; 0: it is awake
CLOSING: Final = 1

# a worker's line
WAKES: Final = 0  # how often it was woken; written by the pool
PARKED: Final = 1  # whether it sleeps, and so needs its doorbell
MAIL: Final = 2  # messages the pool has sent it
ROW: Final = 3  # slot it is calling into, or -1
PROGRESS: Final = 4  # calls into envs it has begun

# flags of a row
TERMINATED: Final = 1
TRUNCATED: Final = 2
ENDED_BY: Final = TERMINATED | TRUNCATED
FIRST: Final = 4
IS_FAILED: Final = 8
HAS_INFO: Final = 16

# planes, as notes name them: 0 and 1, and with this their values without a fixed size
OBJECTS: Final = 2

# what a slot is asked for
STEP: Final = 0
RESET: Final = 1
RESTART: Final = 2


class ControlLines:
    """The common line and each worker's, as memoryviews of int64: a read or write takes 30 ns.

    Attributes:
        common: indexed by NEED and CLOSING.
        workers: indexed by WAKES, PARKED, MAIL, ROW and PROGRESS.
    """

    def __init__(self, memory: MemoryFile, num_workers: int) -> None:
        self._map = memory.map(0, self.size(num_workers))
        self._view = memoryview(self._map).cast("q")
        self.common = self._view[:_LINE]
        self.workers = [self._view[_LINE * (1 + w) : _LINE * (2 + w)] for w in range(num_workers)]

    @staticmethod
    def size(num_workers: int) -> int:
        """Bytes."""
        return 8 * _LINE * (1 + num_workers)

    def close(self) -> None:
        """Unmaps the lines."""
        for view in (*self.workers, self.common, self._view):
            view.release()
        self._map.close()


class Plane:
    """What one kind of call into the envs gave, per slot.

    Attributes:
        obs: tree [N, ...] in the space's dtypes; leaves without a fixed size are objects, not shared.
        objects: those leaves.
        rewards: float32[N].
        flags: uint8[N]; TERMINATED, TRUNCATED, FIRST, IS_FAILED, HAS_INFO.
        infos: float64[N, keys], numbers named by ``info_keys``.
        has_info: bool[N, keys], which of them there are.
    """

    def __init__(self, take: _Cursor, num_envs: int, obs_spec: Tree, num_keys: int) -> None:
        self.obs = map_tree(lambda leaf: take.array((num_envs, *leaf.shape), leaf.dtype), obs_spec)
        self.objects = ObjectLeaves(self.obs)
        self.rewards = take.array((num_envs,), np.float32)
        self.flags = take.array((num_envs,), np.uint8)
        self.infos = take.array((num_envs, num_keys), np.float64)
        self.has_info = take.array((num_envs, num_keys), np.bool_)


class LocalPlane:
    """The rows of one plane that belong to this worker: views."""

    def __init__(self, plane: Plane, mine: slice, number: int) -> None:
        self.number = number
        self.obs: Tree = gather(plane.obs, mine)
        self.rewards: np.ndarray = plane.rewards[mine]
        self.flags: np.ndarray = plane.flags[mine]
        self.infos: np.ndarray = plane.infos[mine]
        self.has_info: np.ndarray = plane.has_info[mine]
        self.objects = ObjectLeaves(self.obs)


class SlotBlock:
    """The per-slot columns.

    A slot has work to do where ``request != done``, and a row to be fetched where ``done != taken``; each is written
    by one side only, and counts up (and around).

    Attributes:
        request: uint32[N], written by the pool, after ``actions`` and ``command``.
        done: uint32[N], written by the worker, after the row: the request it answers.
        taken: uint32[N], written by the pool: the last answer it took.
        ahead: uint32[N], written by the worker: the request that ended the episode, once the slot is reset again.
        command: uint8[N]; STEP, RESET or RESTART.
        wanted: bool[N], written by the pool: it waits for this slot's reset done ahead.
        incarnation: int32[N], of the env that RESTART builds.
        steps: int32[N], steps of the episode the latest row belongs to.
        actions: tree [N, ...]; leaves without a fixed size are objects, not shared: see ``action_places``.
        action_places: int64[N, 2], of an :class:`~rlsample.env.pool.pickled_values.ActionFile`.
        step: :class:`Plane` of steps, and of resets that were asked for.
        first: :class:`Plane` of resets done ahead.
    """

    def __init__(
        self,
        buffer: mmap.mmap | None,
        num_envs: int,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]],
        num_info_keys: int,
    ) -> None:
        take = _Cursor(buffer)
        self.request, self.done, self.taken, self.ahead = (take.array((num_envs,), np.uint32) for _ in range(4))
        self.command, self.wanted = take.array((num_envs,), np.uint8), take.array((num_envs,), np.bool_)
        self.incarnation, self.steps = (take.array((num_envs,), np.int32) for _ in range(2))
        obs_spec, action_spec = (leaf_spec(space) for space in spaces)
        self.actions = map_tree(lambda leaf: take.array((num_envs, *leaf.shape), leaf.dtype), action_spec)
        self.action_places = take.array((num_envs, 2), np.int64)
        self.step = Plane(take, num_envs, obs_spec, num_info_keys)
        self.first = Plane(take, num_envs, obs_spec, num_info_keys)
        self.size = take.offset

    @classmethod
    def size_of(cls, num_envs: int, spaces: tuple[Any, Any], num_info_keys: int) -> int:
        """Bytes it needs."""
        return cls(None, num_envs, spaces, num_info_keys).size


class _Cursor:
    """Hands out arrays one after the other; without a buffer it only counts."""

    def __init__(self, buffer: mmap.mmap | None) -> None:
        self._buffer = buffer
        self.offset = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if np.dtype(dtype).hasobject:  # references mean nothing elsewhere
            return np.empty(shape, object)
        start = -(-self.offset // 64) * 64
        spec = LeafSpec(shape, np.dtype(dtype))
        self.offset = start + int(np.prod(shape)) * spec.dtype.itemsize
        if self._buffer is None:
            return np.empty((0,), spec.dtype)
        return np.ndarray(shape, spec.dtype, buffer=self._buffer, offset=start)
