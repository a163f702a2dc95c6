"""Next observations of rows in a ring: most are another row's own observation, and only the others are stored."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsample import tree
from rlsample.errors import ConfigError
from rlsample.sample_batch import NEXT_OBS, OBS, NextObs, SampleBatch
from rlsample.tree import Tree

__all__ = ["NextObsRing"]


class NextObsRing:
    """For each row of a ring of ``capacity`` rows, where its next observation is.

    A row points forward only, to a row that was added after it and so leaves after it, or to an extra observation.
    Extras are a ring of their own, in the order of the rows that use them; it grows as needed, to ``capacity`` at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._index = np.zeros(capacity, np.int64)  # i >= 0: row i of the ring; -1 - e: the e-th extra ever added
        self._extra: Tree = None
        self._last_row = np.zeros(0, np.int64)  # per extra: the last row, of all ever added, that uses it
        self._room = 0
        self._num_extra = 0  # ever added
        self._oldest = 0  # extras before this one are not used any more, nor are some after it

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken."""
        extra = 0 if self._extra is None else sum(leaf.nbytes for leaf in tree.leaves(self._extra))
        return self._index.nbytes + self._last_row.nbytes + extra

    def add(self, batch: SampleBatch, first: int) -> None:
        """Takes the next observations of a batch, at most ``capacity`` rows, which become the rows number ``first``
        and up of all ever added.

        Raises:
            ConfigError: next observations of another shape or dtype than observations; nothing changed.
        """
        count, start = batch.count, first % self._capacity
        nxt = None if NEXT_OBS in batch.keys() else batch.next_obs_source  # noqa: SIM118
        if nxt is None or nxt.source is not None:
            nxt = NextObs(-1 - np.arange(count, dtype=np.int64), batch[NEXT_OBS])
        apart = (nxt.index <= np.arange(count)).nonzero()[0]  # rows whose next observation is no later row's own
        if len(apart) and not tree.alike(nxt.extra, batch[OBS]):
            forms = tree.row_form(nxt.extra), tree.row_form(batch[OBS])
            raise ConfigError(f"replay: next_obs is {forms[0]} per row, and obs is {forms[1]}")
        index = nxt.index + start
        whole = start + count <= self._capacity
        if not whole:
            index %= self._capacity
        staying = first + count - self._capacity
        if len(apart) == 1:  # index arrays would take three times as long
            row, used = apart.item(), nxt.index.item(apart.item())
            source, at = (nxt.extra, -1 - used) if used < 0 else (batch[OBS], used)
            index[row] = -1 - self._num_extra
            self._store(tree.gather(source, slice(at, at + 1)), 1, first + row, staying)
        elif len(apart):
            used = nxt.index[apart]
            is_start = np.ones(len(used), bool)  # rows of one n-step window share their last observation
            np.not_equal(used[1:], used[:-1], out=is_start[1:])
            index[apart] = -self._num_extra - is_start.cumsum()
            last_rows = first + apart[np.append(is_start[1:], True)]
            self._store(NextObs(used[is_start], nxt.extra).gather(batch[OBS]), len(last_rows), last_rows, staying)
        self._index[slice(start, start + count) if whole else np.arange(first, first + count) % self._capacity] = index

    def _store(self, obs: Tree, count: int, last_rows: int | np.ndarray, first_staying: int) -> None:
        """Adds ``count`` extras: observations, and the last row that uses each."""
        end = self._num_extra + count
        if end - self._oldest > self._room:
            self._oldest = bisect.bisect_left(
                range(self._num_extra),
                first_staying,
                lo=self._oldest,
                key=lambda number: self._last_row[number % self._room],
            )
        if end - self._oldest > self._room:
            self._grow(obs, end - self._oldest)
        at = self._num_extra % self._room
        places = slice(at, at + count) if at + count <= self._room else np.arange(at, at + count) % self._room
        tree.assign(self._extra, places, obs)
        self._last_row[places] = last_rows
        self._num_extra = end

    def _grow(self, like: Tree, needed: int) -> None:
        """Makes room for at least ``needed`` extras, and moves those still used."""
        room = min(self._capacity, max(needed, 2 * self._room, 16))
        kept, old_room = np.arange(self._oldest, self._num_extra), self._room

        def move(leaf: np.ndarray, old: np.ndarray | None = None) -> np.ndarray:
            ring = np.zeros((room, *leaf.shape[1:]), leaf.dtype)
            if old is not None and len(kept):
                ring[kept % room] = old[kept % old_room]
            return ring

        self._extra = tree.map_tree(move, like) if not old_room else tree.map_tree(move, like, self._extra)
        self._last_row = move(np.zeros(1, np.int64), self._last_row)
        self._room = room

    def gather(self, rows: np.ndarray, own_obs: Tree) -> Tree:
        """The next observations of int64[K] rows: a tree [K, ...], copies."""
        index = self._index[rows]
        if not self._room:
            return tree.gather(own_obs, index)
        position = np.where(index < 0, -1 - (-1 - index) % self._room, index)
        return NextObs(position, self._extra).gather(own_obs)

    def get_state(self, first: int, stop: int) -> dict[str, Any]:
        """What :meth:`set_state` needs for rows ``first:stop`` of all ever added; copies."""
        index = self._index[np.arange(first, stop) % self._capacity]
        oldest = int((-1 - index[index < 0]).min(initial=self._num_extra))
        kept = np.arange(oldest, self._num_extra)
        extra = tree.gather(self._extra, kept % self._room) if self._room else None
        return {"index": index, "extra": extra, "num_extra": self._num_extra}

    def set_state(self, state: Mapping[str, Any], first: int) -> None:
        """Continues from :meth:`get_state`, in a ring of the same capacity; once only."""
        index = state["index"]
        rows = np.arange(first, first + len(index))
        self._index[rows % self._capacity] = index
        self._num_extra = self._oldest = int(state["num_extra"])
        if state["extra"] is not None:
            kept = np.arange(self._num_extra - tree.num_rows(state["extra"]), self._num_extra)
            self._grow(state["extra"], len(kept))
            self._oldest = self._num_extra - len(kept)
            tree.assign(self._extra, kept % self._room, state["extra"])
            uses = index < 0
            self._last_row[(-1 - index[uses]) % self._room] = rows[uses]
