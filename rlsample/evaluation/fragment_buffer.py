"""Where the sampler writes: one preallocated array per column, a stretch of rows per lane.

Row ``t`` of lane ``l`` is flat row ``l * length + t`` (env-major). Lanes that move together are written through a
strided slice, others through an index array: ``column[rows] = values`` either way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlsample.sample_batch import ENV_ID, EPS_ID, FRAGMENT_ID, OBS, NextObs, SampleBatch, T
from rlsample.tree import Tree, concat, gather, map_tree

__all__ = ["FragmentBuffer", "Rows"]

Rows = slice | np.ndarray


class FragmentBuffer:
    """Rows of ``num_lanes`` lanes, up to ``length`` each, and what is needed to make batches of them.

    Args:
        allocate: n -> the columns, name -> tree [n, ...]; flags must start as False.
        lane_ids: int64[num_lanes], the canonical "all lanes" array: passing this very object takes the fast path.
        length: rows a lane is to hold.
    """

    def __init__(self, allocate: Callable[[int], dict[str, Tree]], lane_ids: np.ndarray, length: int) -> None:
        self.length = length
        self.columns = allocate(len(lane_ids) * length)
        self._allocate = allocate
        self._lane_ids = lane_ids
        self._together: int | None = 0  # the row that all lanes write next, while they move together
        self._next = lane_ids * length  # the flat row each lane writes next; stale while _together is set
        self._starts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._finals: list[tuple[np.ndarray, Tree]] = []

    def rows(self, lanes: np.ndarray) -> Rows:
        """Where these lanes write next: a slice if that is all of them in step, or one lane, else int64[K] rows."""
        if self._together is not None:
            if lanes is self._lane_ids:
                return slice(self._together, None, self.length)
        elif len(lanes) == 1:
            row = self._next.item(lanes.item())
            return slice(row, row + 1)
        return self.flat_rows(lanes)

    def flat_rows(self, lanes: np.ndarray) -> np.ndarray:
        """As :meth:`rows`, always int64[K]."""
        if self._together is not None:
            return lanes * self.length + self._together
        return self._next[lanes]

    def obs_at(self, rows: np.ndarray) -> Tree:
        """Copies of the observations written to these flat rows."""
        return gather(self.columns[OBS], rows)

    def advance(self, lanes: np.ndarray) -> None:
        """These lanes' current rows are complete."""
        if self._together is not None:
            if lanes is self._lane_ids:
                self._together += 1
                return
            self._separate()
        if len(lanes) == 1:  # an index array would take ten times as long
            self._next[lanes.item()] += 1
        else:
            self._next[lanes] += 1

    def lengths(self) -> np.ndarray:
        """int64[num_lanes]: complete rows per lane."""
        if self._together is not None:
            return np.full(len(self._lane_ids), self._together)
        return self._next - self._lane_ids * self.length

    def any_full(self) -> bool:
        """Whether some lane can take no more rows."""
        if self._together is not None:
            return self._together >= self.length
        return bool(self.full().any())

    def full(self) -> np.ndarray:
        """bool[num_lanes]: lanes that can take no more rows."""
        return self.lengths() >= self.length

    def mark_start(self, lanes: np.ndarray, eps_ids: np.ndarray, t: np.ndarray) -> None:
        """From their next row on, these lanes' rows belong to ``eps_ids`` and count from step ``t``; all int64[K]."""
        rows = self.flat_rows(lanes)
        if self._together is not None:
            if self._together < self.length:
                self._starts.append((rows, eps_ids, t))
            return
        room = rows < (lanes + 1) * self.length  # a full lane's next row lies outside its stretch
        if not room.all():
            rows, eps_ids, t = rows[room], eps_ids[room], t[room]
        self._starts.append((rows, eps_ids, t))

    def unmark(self, lane: int) -> None:
        """No episode starts with this lane's next row: its marks there are forgotten."""
        row = int(self.flat_rows(np.array([lane]))[0])
        starts = [(rows[o], eps[o], t[o]) for rows, eps, t in self._starts for o in [rows != row]]
        self._starts = [s for s in starts if len(s[0])]

    def add_finals(self, rows: np.ndarray, obs: Tree) -> None:
        """``obs`` [K, ...] is what followed these flat rows and is no row's own observation. Kept, not copied."""
        self._finals.append((rows, obs))

    def build(self, cut_lanes: np.ndarray, cut_obs: Tree, first_fragment_id: int) -> SampleBatch:
        """A batch of all lanes' complete rows. Takes the arrays along: this buffer is used up.

        Args:
            cut_lanes: int64[C], the lanes whose next observation is at hand; only those with rows and whose last row
                did not end its episode matter.
            cut_obs: tree [C, ...], those observations.
            first_fragment_id: lane l's fragment gets this + l.
        """
        lengths = self.lengths()
        first = self._lane_ids * self.length
        limits = first + lengths
        columns = dict(self.columns)
        position = np.arange(len(first) * self.length)
        if int(lengths.sum()) < len(position):
            valid = (np.arange(self.length) < lengths[:, None]).reshape(-1)
            position = np.cumsum(valid) - valid
            keep = np.flatnonzero(valid)
            columns = {name: gather(column, keep) for name, column in columns.items()}
            written = lengths[cut_lanes] > 0
            if not written.all():
                cut_lanes, cut_obs = cut_lanes[written], gather(cut_obs, written)
        cuts = (limits[cut_lanes] - 1, cut_obs)
        columns[ENV_ID] = np.repeat(self._lane_ids, lengths)
        columns[FRAGMENT_ID] = np.repeat(first_fragment_id + self._lane_ids, lengths)
        return self._finish(columns, position, limits, [cuts, *self._finals])

    def take(self, lane: int, cut_obs: Tree | None, fragment_id: int) -> SampleBatch:
        """A batch of one lane's complete rows, copied out. The lane starts again, empty and without a start mark.

        Args:
            cut_obs: tree [1, ...], the next observation if the last row did not end its episode; else None.
        """
        self._separate()
        first, stop = lane * self.length, int(self._next[lane])
        columns = {name: map_tree(lambda x: x[first:stop].copy(), c) for name, c in self.columns.items()}
        columns[ENV_ID] = np.full(stop - first, lane)
        columns[FRAGMENT_ID] = np.full(stop - first, fragment_id)
        finals = [] if cut_obs is None else [(np.array([stop - 1]), cut_obs)]
        finals += [(rows[mine], gather(obs, mine)) for rows, obs in self._finals for mine in [self._of(rows, lane)]]
        limits = np.zeros(len(self._lane_ids), np.int64)
        limits[lane] = stop
        batch = self._finish(columns, np.arange(-first, stop - first), limits, finals)
        self.drop(lane)
        return batch

    def drop(self, lane: int) -> int:
        """Forgets one lane's rows, marks and final observations; returns how many complete rows that were."""
        self._separate()
        first = lane * self.length
        count = int(self._next[lane]) - first
        self._next[lane] = first
        starts = [(rows[o], eps[o], t[o]) for rows, eps, t in self._starts for o in [~self._of(rows, lane)]]
        finals = [(rows[o], gather(obs, o)) for rows, obs in self._finals for o in [~self._of(rows, lane)]]
        self._starts = [s for s in starts if len(s[0])]
        self._finals = [f for f in finals if len(f[0])]
        return count

    def grow(self) -> None:
        """Doubles every lane's length; what was written moves along."""
        old, lanes = self.length, len(self._lane_ids)

        def move(new: np.ndarray, leaf: np.ndarray) -> None:
            new.reshape(lanes, 2 * old, *leaf.shape[1:])[:, :old] = leaf.reshape(lanes, old, *leaf.shape[1:])

        columns = self._allocate(lanes * 2 * old)
        for name, column in self.columns.items():
            map_tree(move, columns[name], column)
        self.columns = columns
        self._starts = [(rows + rows // old * old, eps, t) for rows, eps, t in self._starts]
        self._finals = [(rows + rows // old * old, obs) for rows, obs in self._finals]
        self._next = self._next + self._lane_ids * old
        self.length = 2 * old

    def _separate(self) -> None:
        if self._together is not None:
            self._next = self._lane_ids * self.length + self._together
            self._together = None

    def _of(self, rows: np.ndarray, lane: int) -> np.ndarray:
        return rows // self.length == lane

    def _finish(
        self,
        columns: dict[str, Tree],
        position: np.ndarray,
        limits: np.ndarray,
        finals: list[tuple[np.ndarray, Tree]],
    ) -> SampleBatch:
        """Adds eps_id, t and the next observations.

        Args:
            position: int64, flat row -> row of the batch.
            limits: int64[num_lanes], flat row after each lane's last one; marks beyond belong to the next batch.
        """
        env_ids = columns[ENV_ID]
        total = len(env_ids)
        rows, eps, t = (np.concatenate(parts) for parts in zip(*self._starts, strict=True))
        inside = rows < limits[rows // self.length]
        rows, eps, t = position[rows[inside]], eps[inside], t[inside]
        order = np.argsort(rows, kind="stable")  # of two marks on one row the later one wins: the first covers 0 rows
        rows, eps, t = rows[order], eps[order], t[order]
        runs = np.diff(rows, append=total)
        columns[EPS_ID] = np.repeat(eps, runs)
        columns[T] = np.arange(total) - np.repeat(rows - t, runs)
        extra_rows = np.concatenate([rows for rows, _ in finals])
        index = np.arange(1, total + 1)
        # an ended row listed as a cut too keeps its final observation: finals come last
        index[position[extra_rows]] = -1 - np.arange(len(extra_rows))
        next_obs = NextObs(index=index, extra=concat([obs for _, obs in finals]))
        lengths = np.diff(np.flatnonzero(np.diff(env_ids, prepend=-1)), append=total)
        return SampleBatch(columns, next_obs, fragment_lengths=lengths)
