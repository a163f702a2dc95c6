"""A worker's sub-envs: stepped and reset, with every result written straight into the shared rows."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from rlsample.env.base_env import slot_seed
from rlsample.env.gym_wrappers import all_bools, all_dicts, bad_number, bad_result, coerce_flags, coerce_info
from rlsample.env.pool.env_plan import EnvPlan
from rlsample.env.pool.memory_file import MemoryFile
from rlsample.env.pool.messages import pack_failure
from rlsample.env.pool.pickled_values import ActionFile, ObjectLeaves
from rlsample.env.pool.shared_block import (
    FIRST,
    HAS_INFO,
    IS_FAILED,
    OBJECTS,
    PROGRESS,
    ROW,
    TERMINATED,
    TRUNCATED,
    LocalPlane,
    SlotBlock,
)
from rlsample.env.pool.slot_envs import SlotEnvs
from rlsample.env.quick_contains import quicken
from rlsample.env.slot_failures import raised
from rlsample.env.spaces import ActionCodec, ObsWriter, coerce_reward, nonfinite_rows
from rlsample.errors import EnvFailedError
from rlsample.tree import gather, leaves

__all__ = ["SlotRunner"]

_BLANK = (None, 0.0, False, False, None)


class SlotRunner:
    """The sub-envs of slots ``first <= slot < stop``; row r of the shared views is slot ``first + r``.

    The checks and the words of the errors are those of the inline loop (:mod:`rlsample.env.gym_envs`).

    Attributes:
        slots: the envs themselves.
        outbox: what has to travel by pipe before the rows are published: ``(slot, plane, request, payload)``, the
            payload a pickled info or a packed failure; plane + OBJECTS: a row's pickled values without a fixed size.
    """

    def __init__(self, plan: EnvPlan, slots: range, line: memoryview) -> None:
        self.plan, self.first, self.count = plan, slots.start, len(slots)
        self.slots = SlotEnvs(plan, slots, line)
        self.outbox: list[tuple[int, int, int, Any]] = []
        self._line = line
        self._until_late = 0  # so many calls of step at least before a slot reaches its time limit
        self._seeded = [False] * self.count
        self._ahead: set[int] = set()  # rows that were reset ahead and not stepped since

    def attach(self, block: SlotBlock, memory: MemoryFile, spaces: tuple[Any, Any]) -> None:
        """Takes the shared columns; from now on :meth:`step` and the resets can be called."""
        mine = slice(self.first, self.first + self.count)
        self._spaces = spaces
        self._writer, self._codec = ObsWriter(spaces[0], any_size=True), ActionCodec(spaces[1], any_size=True)
        self._actions, self._action_file = gather(block.actions, mine), ActionFile(memory, block.action_places[mine])
        self._action_objects = ObjectLeaves(self._actions)
        self._elapsed = np.zeros(self.count, np.int64)
        self._shown_steps, self._asked = block.steps[mine], block.incarnation[mine]
        self.request, self.done, self.ahead = block.request[mine], block.done[mine], block.ahead[mine]
        self.wanted = block.wanted[mine]
        self.stepped, self.firsts = LocalPlane(block.step, mine, 0), LocalPlane(block.first, mine, 1)
        for env in self.slots.envs:
            if env is not None:
                quicken(env)
        shape, dtype = self._writer.shape, self._writer.dtype
        self._checks_obs = dtype is not None and dtype.kind == "f"
        self._has_floats = any(leaf.dtype.kind in "fO" for leaf in leaves(self.stepped.obs))
        if shape:
            self._row_lengths = {shape[0]}
            self._flat_obs = self.stepped.obs.reshape(-1, *shape[1:])

    def show_steps(self, rows: list[int]) -> None:
        """Writes how many steps the episodes of these rows have; before the rows are published."""
        where: Any = slice(None) if len(rows) == self.count else rows
        self._shown_steps[where] = self._elapsed[where]

    # ------------------------------------------------------------------ stepping

    def step(self, rows: list[int]) -> list[int]:
        """Steps these rows with the shared actions and writes what came; returns those whose episode ended."""
        everyone = len(rows) == self.count
        where: Any = slice(None) if everyone else rows
        if self._ahead:
            begun = self._ahead.intersection(rows)
            self._elapsed[list(begun)] = 0
            self._ahead -= begun
        failed: dict[int, EnvFailedError] = {}
        for row in rows if self._action_objects else ():
            self._action_objects.unpack(row, self._action_file.read(row))
        results = self._call_steps(rows, self._codec.to_env(gather(self._actions, where)), failed)
        self._elapsed[where] += 1
        terminated, truncated, infos = self._write_rows(rows, where, results, failed)
        self._until_late -= 1
        if self._until_late <= 0:
            truncated = self._with_limits(rows, truncated)
        flags = self.stepped.flags
        flags[where] = 0
        ended: list[int] = []
        if any(terminated) or any(truncated):
            for row, term, trunc in zip(rows, terminated, truncated, strict=True):
                if term or trunc:
                    flags[row] = (TERMINATED if term else 0) | (TRUNCATED if trunc else 0)
                    ended.append(row)
        for row in rows if self.stepped.objects else ():
            try:
                if row not in failed:
                    self._send_objects(self.stepped, row, int(self._elapsed[row]))
            except EnvFailedError as e:
                failed[row] = e
        if failed or any(infos):
            self._post(self.stepped, rows, {row: info for row, info in zip(rows, infos, strict=True) if info}, failed)
        elif self.plan.info_keys:
            self.stepped.has_info[where] = False
        return [row for row in ended if not flags[row] & IS_FAILED] if failed else ended

    def _with_limits(self, rows: list[int], truncated: Any) -> list[bool]:
        """The truncated flags and the time limits, which are looked at only when some slot may have reached its own."""
        limits = self.slots.limits
        left = limits - self._elapsed
        self._until_late = int(np.where(left > 0, left, limits).min())  # one that ends here starts again
        return [trunc or over for trunc, over in zip(truncated, (left[rows] <= 0).tolist(), strict=True)]

    def _call_steps(self, rows: list[int], actions: list[Any], failed: dict[int, EnvFailedError]) -> list[Any]:
        """What each env returned; a blank, and an entry in ``failed``, for one that raised."""
        slots, line, first = self.slots, self._line, self.first
        calls = slots.steps if len(rows) == self.count else [slots.steps[row] for row in rows]
        begun = slots.begun
        results: list[Any] = []
        append = results.append
        turns = zip(rows, calls, actions, strict=True)
        while len(results) < len(rows):
            try:
                for row, call, action in turns:
                    begun += 1
                    line[ROW], line[PROGRESS] = first + row, begun
                    append(call(action))
            except Exception as e:
                row = rows[len(results)]
                failed[row] = self._failure(row, e, "step", int(self._elapsed[row]) + 1)
                append(_BLANK)
        slots.begun = begun
        line[ROW] = -1
        return results

    def _write_rows(
        self, rows: list[int], where: Any, results: list[Any], failed: dict[int, EnvFailedError]
    ) -> tuple[Any, Any, Any]:
        """Writes observations and rewards; returns both flags and the infos. All at once where all is well."""
        plane, shape = self.stepped, self._writer.shape
        if shape and not failed:
            try:
                all_obs, all_rewards, terminated, truncated, infos = zip(*results, strict=True)
                rewards = np.array(all_rewards, np.float32)
                if set(map(len, all_obs)) == self._row_lengths and rewards.ndim == 1:
                    if len(rows) == self.count:
                        np.concatenate(all_obs, out=self._flat_obs, casting="no")
                        flat = self._flat_obs.ravel()
                    else:
                        part = np.concatenate(all_obs, dtype=self._writer.dtype, casting="no")
                        plane.obs[rows] = part.reshape(len(rows), *shape)
                        flat = part.ravel()
                    plane.rewards[where] = rewards
                    # squares summed are finite only if all entries are; else the exact check decides
                    flat = flat if self._checks_obs else rewards
                    if self.plan.allow_nonfinite or (isfinite(flat.dot(flat)) and isfinite(rewards.dot(rewards))):
                        told = any(terminated) or any(truncated)
                        if (not told or all_bools(terminated, truncated)) and (not any(infos) or all_dicts(infos)):
                            return terminated, truncated, infos
            except (TypeError, ValueError):
                pass
        return self._write_one_by_one(rows, results, failed)

    def _write_one_by_one(
        self, rows: list[int], results: list[Any], failed: dict[int, EnvFailedError]
    ) -> tuple[Any, Any, Any]:
        """As :meth:`_write_rows`, with every result checked by itself and the faulty ones in ``failed``."""
        count, plane, allow = len(rows), self.stepped, self.plan.allow_nonfinite
        terminated, truncated = [False] * count, [False] * count
        infos: list[Any] = [None] * count
        for at, (row, result) in enumerate(zip(rows, results, strict=True)):
            if row in failed:
                continue
            slot, step = self.first + row, int(self._elapsed[row])
            try:
                if not isinstance(result, tuple) or len(result) != 5:
                    raise EnvFailedError(bad_result(result, slot, step), slot=slot, episode_step=step)
                ob, reward, term, trunc, info = result
                self._writer.write(plane.obs, row, ob, slot, step)
                plane.rewards[row] = coerce_reward(reward, slot, step, allow)
                terminated[at], truncated[at] = coerce_flags(term, trunc, slot, step)
                infos[at] = coerce_info(info, slot, step)
            except Exception as e:
                failed[row] = self._failure(row, e, "step", step)
        if self._has_floats and not allow:
            self._find_nonfinite(rows, failed)
        return terminated, truncated, infos

    def _find_nonfinite(self, rows: list[int], failed: dict[int, EnvFailedError]) -> None:
        for at, path, value in nonfinite_rows(gather(self.stepped.obs, rows)):
            row = rows[at]
            slot, step = self.first + row, int(self._elapsed[row])
            what = bad_number(f"slot {slot}, episode step {step}", path, value)
            failed.setdefault(row, EnvFailedError(what, slot=slot, episode_step=step))

    def _failure(self, row: int, error: Exception, where: str, step: int | None = None) -> EnvFailedError:
        return raised(self.first + row, error, where, step)

    # ------------------------------------------------------------------ starting again

    def restart(self, rows: list[int]) -> None:
        """Replaces the envs of these rows and resets the new ones."""
        built = []
        for row in rows:
            self._seeded[row], self._until_late = False, 0
            try:
                self.slots.rebuild(row, int(self._asked[row]), self._spaces)
                built.append(row)
            except Exception as e:
                self.stepped.flags[row] = 0
                self._post(self.stepped, [row], {}, {row: self._failure(row, e, "reset")})
        self.reset(built)

    def reset(self, rows: list[int], seeds: list[int | None] | None = None, options: Any = None) -> None:
        """Resets these rows, for all to see; ``seeds`` and ``options`` go to the envs."""
        self._ahead.difference_update(rows)
        for at, row in enumerate(rows):
            self._reset_one(self.stepped, row, None if seeds is None else seeds[at], options)
            self._elapsed[row] = 0

    def reset_ahead(self, row: int) -> None:
        """Resets a row whose episode has ended, before anybody asks."""
        self._reset_one(self.firsts, row, None, None)
        self._ahead.add(row)

    def _reset_one(self, plane: LocalPlane, row: int, seed: int | None, options: Any) -> None:
        """Resets one env; ``seed`` None: the slot's own seed if it is the first reset, else none."""
        slot, env = self.first + row, self.slots.envs[row]
        self.slots.mark(row)
        if seed is None:
            seed = self._first_seed(row)
        self._seeded[row] = True
        plane.flags[row] = FIRST
        if plane is self.stepped:
            plane.rewards[row] = 0
        try:
            ob, info = env.reset(seed=seed) if options is None else env.reset(seed=seed, options=options)
            self._writer.write(plane.obs, row, ob, slot, None)
            if self._has_floats and not self.plan.allow_nonfinite:
                for _, path, value in nonfinite_rows(gather(plane.obs, slice(row, row + 1))):
                    raise EnvFailedError(bad_number(f"slot {slot}", path, value), slot=slot)
            info = coerce_info(info, slot, None)
            if plane.objects:
                self._send_objects(plane, row, None)
        except Exception as e:
            self._post(plane, [row], {}, {row: self._failure(row, e, "reset")})
        else:
            if info or self.plan.info_keys:
                self._post(plane, [row], {row: info} if info else {}, {})
        self.slots.unmark()

    def _first_seed(self, row: int) -> int | None:
        if self._seeded[row]:
            return None
        plan = self.plan
        return slot_seed(plan.seed, plan.worker_index, self.first + row, self.slots.incarnation[row])

    # ------------------------------------------------------------------ infos and failures

    def _post(
        self, plane: LocalPlane, rows: list[int], infos: dict[int, Any], failed: dict[int, EnvFailedError]
    ) -> None:
        keys = self.plan.info_keys
        if keys:
            plane.has_info[rows] = False
        for row, info in infos.items():
            if row in failed:
                continue
            try:
                if keys:
                    self._write_numbers(plane, row, info)
                    continue
                packed = pickle.dumps(info, protocol=5)
            except Exception as e:
                what = "hold only numbers under info_keys" if keys else "name what you need of it in info_keys"
                failed[row] = EnvFailedError(
                    f"slot {self.first + row}: its info cannot be sent to another process ({type(e).__name__}: {e}); "
                    f"{what}",
                    slot=self.first + row,
                    episode_step=None if plane.flags[row] & FIRST else int(self._elapsed[row]),
                )
                continue
            plane.flags[row] |= HAS_INFO
            self._send(plane, row, packed)
        for row, failure in failed.items():
            plane.flags[row] = IS_FAILED
            self._send(plane, row, pack_failure(failure))

    def _write_numbers(self, plane: LocalPlane, row: int, info: Mapping[str, Any]) -> None:
        for at, key in enumerate(self.plan.info_keys):
            if key in info:
                plane.infos[row, at] = info[key]
                plane.has_info[row, at] = True
                plane.flags[row] |= HAS_INFO

    def _send_objects(self, plane: LocalPlane, row: int, step: int | None) -> None:
        data = plane.objects.pack_observation(row, self.first + row, step)
        self.outbox.append((self.first + row, plane.number + OBJECTS, int(self.request[row]), data))

    def _send(self, plane: LocalPlane, row: int, payload: Any) -> None:
        self.outbox.append((self.first + row, plane.number, int(self.request[row]), payload))
