"""The block ``[lanes, polls]`` of envs that step together, and its books, which are kept once per block.

In each poll every lane gets a cell, also those whose env was only reset: such a cell is a *hole* and no row of the
batch. What a poll brought is kept as it came. When the block is full, everything else is worked out from the cells at
once: which are rows, which episode a row belongs to, how long episodes were and what they returned.

Cells are numbered lane by lane, with one cell more per lane than there were polls: ``lane * (polls + 1) + column``. The
extra cell is no row; an episode that begins after the block's last poll begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlsample.evaluation.fragment_buffer import FragmentBuffer
from rlsample.sample_batch import (
    ACTIONS,
    ENV_ID,
    EPS_ID,
    FRAGMENT_ID,
    OBS,
    POLICY_VERSION,
    REWARDS,
    TERMINATED,
    TRUNCATED,
    NextObs,
    SampleBatch,
    T,
)
from rlsample.tree import Tree, assign, concat, map_tree

__all__ = ["BlockBooks", "LockstepBlock", "Runs"]


class Runs(NamedTuple):
    """Stretches of one episode in one lane, by cell; each lane has at least one.

    Attributes:
        cells: int64[R], rising, the cell of the first step.
        eps_ids: int64[R].
        t: int64[R], the episode's steps before that cell.
        returns: float64[R], its rewards before that cell.
        next_id: the id that the next episode gets.
    """

    cells: np.ndarray
    eps_ids: np.ndarray
    t: np.ndarray
    returns: np.ndarray
    next_id: int


class BlockBooks(NamedTuple):
    """What became of the episodes.

    Attributes:
        finished: (returns float64[F], lengths, lanes, eps_ids int64[F]) of those that ended, in that order.
        running: where each lane's episode stands now, as in ``EpisodeTracker.get_state``.
    """

    finished: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    running: dict[str, Any]


class LockstepBlock(FragmentBuffer):
    """A buffer whose lanes always move together.

    Args:
        allocate, lane_ids, length: as for :class:`FragmentBuffer`.
        spare: room for that many polls more than ``length``, where some cells may turn out to be holes.
        running: ``EpisodeTracker.get_state()`` of now.
    """

    def __init__(
        self,
        allocate: Callable[[int], dict[str, Tree]],
        lane_ids: np.ndarray,
        length: int,
        spare: int,
        running: Mapping[str, Any],
    ) -> None:
        super().__init__(allocate, lane_ids, length + spare)
        self.target = length
        self.polls = 0
        self._running = running
        polls = (self.length, len(lane_ids))
        self._versions = np.empty(self.length, np.int64)
        self._rewards = np.empty(polls, np.float32)
        self._terminated, self._truncated, self._is_first = (np.empty(polls, bool) for _ in range(3))
        self._begun: list[tuple[int, np.ndarray]] = []  # (column, lanes): episodes that begin without a hole before

    def write_choice(self, obs: Tree, actions: Tree, extras: Mapping[str, np.ndarray], version: int) -> None:
        """What the policy saw in the current column, and what it chose, all [lanes, ...]; copied."""
        cells, columns = slice(self.polls, None, self.length), self.columns
        assign(columns[OBS], cells, obs)
        assign(columns[ACTIONS], cells, actions)
        for name, values in extras.items():
            columns[name][cells] = values
        self._versions[self.polls] = version

    def add(self, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, is_first: np.ndarray) -> None:
        """The outcome of the current column, all [lanes], raw. The next column becomes current."""
        poll = self.polls
        self._rewards[poll] = rewards
        self._terminated[poll] = terminated
        self._truncated[poll] = truncated
        self._is_first[poll] = is_first
        self.polls = self._together = poll + 1

    def begin(self, lanes: np.ndarray) -> None:
        """New episodes begin in these lanes with the current column. After a hole that goes without saying."""
        self._begun.append((self.polls, lanes))

    def add_finals_before(self, lanes: np.ndarray, obs: Tree) -> None:
        """``obs`` [K, ...] is what followed these lanes' last cells. Only needed where no hole follows, to hold it."""
        if self.polls:
            self.add_finals(lanes * self.length + self.polls - 1, obs)

    def target_reached(self) -> bool:
        """Whether some lane has ``target`` rows; holes are none."""
        if self.polls < self.target:
            return False
        return self.polls - int(self._is_first[: self.polls].sum(0).min()) >= self.target

    def grow(self) -> None:
        super().grow()
        for name in ("_versions", "_rewards", "_terminated", "_truncated", "_is_first"):
            kept = getattr(self, name)
            setattr(self, name, np.concatenate([kept, np.empty_like(kept)]))

    def runs(self) -> Runs:
        """The episodes of the block. New ones are numbered by poll, then those after holes first, then by lane."""
        lanes, stride, running = self._lane_ids, self.polls + 1, self._running
        columns, where = self._holes_in_order()
        columns = columns + 1
        if self._begun:
            columns = np.concatenate([columns, *(np.full(len(b), column) for column, b in self._begun)])
            where = np.concatenate([where, *(b for _, b in self._begun)])
            order = np.argsort(columns, kind="stable")
            columns, where = columns[order], where[order]
        next_id = running["next_id"] + len(where)
        before, new = np.zeros(len(where), np.int64), np.arange(running["next_id"], next_id)
        cells = np.concatenate([lanes * stride, where * stride + columns])
        order = np.argsort(cells, kind="stable")
        cells = cells[order]
        distinct = np.ones(len(cells), bool)  # an episode that begins in the first column leaves the old one no cell
        distinct[:-1] = cells[1:] != cells[:-1]
        order = order[distinct]
        return Runs(
            cells[distinct],
            np.concatenate([running["eps_id"], new])[order],
            np.concatenate([running["lengths"], before])[order],
            np.concatenate([running["returns"], before])[order],
            next_id,
        )

    def books(self, runs: Runs) -> BlockBooks:
        """Lengths and returns of the episodes that ended, and of those that run."""
        count, stride = len(self._lane_ids), self.polls + 1
        rewards = np.zeros((count, stride))
        rewards[:, :-1] = self._rewards[: self.polls].T
        returns = runs.returns + np.add.reduceat(rewards.reshape(-1), runs.cells)
        over = self._terminated[: self.polls] | self._truncated[: self.polls]
        columns, lanes = np.divmod(over.reshape(-1).nonzero()[0], count)
        cells = lanes * stride + columns
        run = runs.cells.searchsorted(cells, "right") - 1
        lengths = runs.t[run] + cells + 1 - runs.cells[run]
        ends = self._lane_ids * stride + self.polls
        last = runs.cells.searchsorted(ends, "right") - 1
        running = {
            "eps_id": runs.eps_ids[last],
            "lengths": runs.t[last] + ends - runs.cells[last],
            "returns": returns[last],
            "next_id": runs.next_id,
        }
        return BlockBooks((returns[run], lengths, lanes, runs.eps_ids[run]), running)

    def write_outcomes(self, clip: Callable[[np.ndarray], np.ndarray] | None, flags: bool) -> None:
        """Fills the columns of versions, of rewards, clipped, and of both flags, which hold False until then."""
        polls = self.polls
        rewards = self._rewards[:polls]
        self._grid(POLICY_VERSION)[:] = self._versions[:polls]
        self._grid(REWARDS)[:] = (rewards if clip is None else clip(rewards)).T
        if flags:
            self._grid(TERMINATED)[:] = self._terminated[:polls].T
            self._grid(TRUNCATED)[:] = self._truncated[:polls].T

    def build_block(self, runs: Runs, seen: Tree, first_fragment_id: int) -> SampleBatch:
        """A batch of all lanes' rows, lane by lane. Takes the arrays along: this block is used up.

        Args:
            runs: of this block.
            seen: tree [lanes, ...], what each lane observed last.
            first_fragment_id: lane l's fragment gets this + l.
        """
        count, polls = len(self._lane_ids), self.polls
        grid = np.zeros((count, polls + 1), bool)
        np.logical_not(self._is_first[:polls].T, out=grid[:, :polls])
        valid = grid.reshape(-1)
        no_rows = (~valid).nonzero()[0]
        lengths = grid.sum(1)
        full = polls == self.length and len(no_rows) == count
        columns = self.columns if full else self._rows_of(grid)
        env_ids = self._lane_ids.repeat(lengths)
        firsts = runs.cells - no_rows.searchsorted(runs.cells)  # rows before
        spans = np.append(firsts[1:], len(env_ids)) - firsts
        numbers = np.arange(1, len(env_ids) + 1)
        batch = {
            **columns,
            ENV_ID: env_ids,
            FRAGMENT_ID: env_ids + first_fragment_id,
            EPS_ID: runs.eps_ids.repeat(spans),
            T: numbers + (runs.t - firsts - 1).repeat(spans),
        }
        cells, extra = self._extra_obs(grid, seen)
        numbers[cells - no_rows.searchsorted(cells)] = np.arange(-1, -1 - len(cells), -1)
        return SampleBatch(batch, NextObs(numbers, extra), lengths[lengths > 0])

    def _extra_obs(self, grid: np.ndarray, seen: Tree) -> tuple[np.ndarray, Tree]:
        """Row cells whose next observation is no row's own, and those observations; of two for a cell the later holds.

        What follows a lane's last row was seen last; what follows an end stands in the hole after it, or was added.
        """
        stride, valid = self.polls + 1, grid.reshape(-1)
        cut = grid[:, -2].nonzero()[0]
        columns, lanes = self._holes_in_order()
        ended = lanes * stride + columns - 1
        after_row = valid[ended]  # not after the extra cell of the lane before, or the last cell of all
        ended, holes = ended[after_row], (lanes * self.length + columns)[after_row]
        cells = [cut * stride + self.polls - 1, ended]
        extra = [_take(seen, cut), _take(self.columns[OBS], holes)]
        for rows, obs in self._finals:
            cells.append(rows // self.length * stride + rows % self.length)
            extra.append(obs)
        return np.concatenate(cells), concat(extra)

    def _holes_in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """(columns, lanes) of the holes, by column, then lane: int64[H] each."""
        return np.divmod(self._is_first[: self.polls].reshape(-1).nonzero()[0], len(self._lane_ids))

    def _rows_of(self, grid: np.ndarray) -> dict[str, Tree]:
        room = np.zeros((len(grid), self.length), bool)
        room[:, : self.polls] = grid[:, :-1]
        rows = room.reshape(-1).nonzero()[0]
        return {name: _take(column, rows) for name, column in self.columns.items()}

    def _grid(self, name: str) -> np.ndarray:
        """A view [lanes, polls] of a column."""
        return self.columns[name].reshape(-1, self.length)[:, : self.polls]


def _take(tree: Tree, rows: np.ndarray) -> Tree:
    """``leaf[rows]`` for each leaf; ``take`` does that several times faster for rows that are arrays."""
    return map_tree(lambda leaf: leaf.take(rows, 0), tree)
