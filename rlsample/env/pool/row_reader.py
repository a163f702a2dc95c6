"""Rows out of shared memory, as batches that own their arrays."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlsample.env.base_env import StepBatch
from rlsample.env.pool.messages import unpack_failure
from rlsample.env.pool.shared_block import (
    ENDED_BY,
    FIRST,
    HAS_INFO,
    IS_FAILED,
    OBJECTS,
    STEP,
    TERMINATED,
    TRUNCATED,
    Plane,
)
from rlsample.env.pool.worker_team import WorkerTeam
from rlsample.env.slot_states import ENDED, FAILED, WAITING, SlotStates
from rlsample.errors import EnvFailedError
from rlsample.tree import gather, map_tree

__all__ = ["ColumnInfos", "RowReader", "merge_batches", "reorder"]


_NOTHING, _FIRSTS = {0}, {FIRST}
_ENDS, _CUTS = {0, TERMINATED, TRUNCATED, ENDED_BY}, {TRUNCATED, ENDED_BY}


class ColumnInfos(Mapping[int, dict[str, float]]):
    """Infos that came as columns; a row's dict is made when it is asked for.

    Attributes:
        keys_of_columns: the names.
        values_of_columns: float64[K, keys].
        present: bool[K, keys], which of them there are; the other values mean nothing.
    """

    def __init__(self, names: tuple[str, ...], values: np.ndarray, present: np.ndarray) -> None:
        self.keys_of_columns, self.values_of_columns, self.present = names, values, present
        self._rows = np.flatnonzero(present.any(axis=1)).tolist()

    def __getitem__(self, row: int) -> dict[str, float]:
        if row not in self._rows:
            raise KeyError(row)
        columns = zip(self.keys_of_columns, self.values_of_columns[row], self.present[row], strict=True)
        return {name: float(value) for name, value, there in columns if there}

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class RowReader:
    """Copies finished rows out of shared memory and moves their slots on."""

    def __init__(self, team: WorkerTeam, worker_of: np.ndarray, states: SlotStates, info_keys: tuple[str, ...]) -> None:
        self._team, self._block, self._worker_of = team, team.block, worker_of
        self._states, self._info_keys = states, info_keys
        self._no, self._zeros = np.zeros(states.num_envs, bool), np.zeros(states.num_envs, np.float32)
        self._yes = ~self._no
        for shared in (self._no, self._yes, self._zeros):
            shared.flags.writeable = False

    def empty(self) -> StepBatch:
        """A batch of no rows."""
        return self.take(np.zeros(0, np.int64))

    def take(self, ids: np.ndarray) -> StepBatch:
        """The finished rows of these slots, int64[K]; those that failed are in ``failures`` instead."""
        block, code = self._block, self._states.code
        plane = block.step
        if plane.objects:
            self._fetch_objects(plane, 0, ids)
        if ids is self._states.all_ids:
            obs: Any = plane.obs.copy() if type(plane.obs) is np.ndarray else map_tree(np.copy, plane.obs)
            rewards, flags = plane.rewards.copy(), plane.flags
            block.taken[:] = block.done
            code.fill(WAITING)
        else:
            obs, rewards, flags = gather(plane.obs, ids), plane.rewards[ids], plane.flags[ids]
            block.taken[ids] = block.done[ids]
            code[ids] = WAITING
        no, seen = self._no[: len(ids)], set(flags.tobytes())
        if seen == _NOTHING or not seen:
            return StepBatch(ids, obs, rewards, no, no, no)
        if seen <= _ENDS:
            bits = flags & ENDED_BY
            ended = bits != 0
            code[ended if ids is self._states.all_ids else ids[ended]] = ENDED
            truncated = bits & TRUNCATED != 0 if seen & _CUTS else no
            return StepBatch(ids, obs, rewards, (bits & TERMINATED).view(bool), truncated, no)
        block.command[ids] = STEP
        return self._with_flags(plane, 0, StepBatch(ids, obs, rewards, no, no, no), flags)

    def take_firsts(self, ids: np.ndarray) -> StepBatch:
        """The first observations of slots that were reset ahead, in this order."""
        plane = self._block.first
        if plane.objects:
            self._fetch_objects(plane, 1, ids)
        self._states.code[ids] = WAITING
        self._block.steps[ids] = 0
        count = len(ids)
        no, flags = self._no[:count], plane.flags[ids]
        batch = StepBatch(ids, gather(plane.obs, ids), self._zeros[:count], no, no, self._yes[:count])
        return batch if set(flags.tobytes()) == _FIRSTS else self._with_flags(plane, 1, batch, flags)

    def _with_flags(self, plane: Plane, number: int, batch: StepBatch, flags: np.ndarray) -> StepBatch:
        """The batch with all that its rows' flags say."""
        ids, code = batch.env_ids, self._states.code
        code[ids[flags & ENDED_BY != 0]] = ENDED
        columns = [flags & bit != 0 for bit in (TERMINATED, TRUNCATED, FIRST)]
        infos = self._infos(plane, number, ids, flags)
        batch = StepBatch(ids, batch.obs, batch.rewards, columns[0], columns[1], columns[2], infos)
        failed = flags & IS_FAILED != 0
        if not failed.any():
            return batch
        code[ids[failed]] = FAILED
        failures = {slot: self._failure(slot, number) for slot in ids[failed].tolist()}
        return reorder(batch._replace(failures=failures), np.flatnonzero(~failed))

    def _infos(self, plane: Plane, number: int, ids: np.ndarray, bits: np.ndarray) -> Mapping[int, dict[str, Any]]:
        rows = np.flatnonzero(bits & HAS_INFO)
        if not len(rows):
            return {}
        if self._info_keys:
            return ColumnInfos(self._info_keys, plane.infos[ids], plane.has_info[ids])
        found = {}
        for row, slot in zip(rows.tolist(), ids[rows].tolist(), strict=True):
            note = self._note(slot, number)
            if note is not None:
                found[row] = pickle.loads(note)
        return found

    def _fetch_objects(self, plane: Plane, number: int, ids: np.ndarray) -> None:
        """Puts the values without a fixed size, which came by pipe, into their columns."""
        for slot in ids[plane.flags[ids] & IS_FAILED == 0].tolist():
            note = self._note(slot, number + OBJECTS)
            if note is None:
                plane.flags[slot] = IS_FAILED
            else:
                plane.objects.unpack(slot, note)

    def _failure(self, slot: int, number: int) -> EnvFailedError:
        note = self._note(slot, number)
        if note is None:
            return EnvFailedError(f"slot {slot}: it failed, and its worker died before it said why", slot=slot)
        return unpack_failure(note)

    def _note(self, slot: int, number: int) -> Any:
        return self._team.note(int(self._worker_of[slot]), slot, number, int(self._block.request[slot]))


def reorder(batch: StepBatch, rows: np.ndarray) -> StepBatch:
    """These rows of a batch, in this order."""
    infos = {new: batch.infos[old] for new, old in enumerate(rows.tolist()) if old in batch.infos}
    columns = [gather(column, rows) for column in batch[:6]]
    return StepBatch._make([*columns, infos, batch.failures, None, None])


def merge_batches(a: StepBatch, b: StepBatch) -> StepBatch:
    """The rows of both, by rising slot."""
    ids = np.concatenate([a.env_ids, b.env_ids])
    order = np.argsort(ids)
    place = np.empty(len(ids), np.int64)
    place[order] = np.arange(len(ids))
    of_a, of_b = place[: len(a.env_ids)], place[len(a.env_ids) :]

    def put(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        column = np.empty((len(ids), *x.shape[1:]), x.dtype)
        column[of_a], column[of_b] = x, y
        return column

    columns = [put(x, y) for x, y in zip(a[2:6], b[2:6], strict=True)]
    obs = put(a.obs, b.obs) if type(a.obs) is np.ndarray else map_tree(put, a.obs, b.obs)
    infos: Mapping[int, dict[str, Any]] = {}
    if a.infos or b.infos:
        infos = {int(of_a[row]): info for row, info in a.infos.items()}
        infos.update({int(of_b[row]): info for row, info in b.infos.items()})
    return StepBatch._make([ids[order], obs, *columns, infos, {**a.failures, **b.failures}, None, None])
