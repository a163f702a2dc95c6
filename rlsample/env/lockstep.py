"""What the adapters of vector envs share: slot states, the batch of actions, checked copies, and closing."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch, slot_seed
from rlsample.env.env_settings import EnvSettings
from rlsample.env.saved_state import pickled
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec, ObsWriter, coerce_reward, nonfinite_rows, zeros_columns
from rlsample.errors import EnvClosedError, EnvFailedError, EnvProtocolError, SpaceError
from rlsample.tree import Tree, assign, gather, map_tree

__all__ = ["LockstepEnv"]

_CLOSE_WAIT_S = 0.4
_BOOL, _FLOAT32 = np.dtype(bool), np.dtype(np.float32)


class LockstepEnv(BaseEnv):
    """B slots that one call steps together.

    A slot that failed gets the last legal action along with the others, and its results are dropped. There are no
    restarts: one slot of a vector env cannot be replaced.

    A subclass says how to reset, step and close; it raises, or returns what the user's env returned.
    """

    lockstep = True

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        settings: EnvSettings,
        seed: int | None,
        worker_index: int,
    ) -> None:
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self._writer, self._codec = ObsWriter(observation_space), ActionCodec(action_space)
        self._allow_nonfinite = settings.allow_nonfinite
        self._seeds = [slot_seed(seed, worker_index, slot) for slot in range(num_envs)]
        self._states = SlotStates(num_envs)
        self.all_ids = self._states.all_ids
        self._all_busy = np.full(num_envs, BUSY, np.int8).tobytes()
        self._all_resetting = np.full(num_envs, RESETTING, np.int8)  # numpy compares arrays faster than with a number
        self._none = np.zeros(num_envs, bool)  # shared by all batches without a first row
        self._none.flags.writeable = False
        self._after_end: int = ENDED  # the state of a slot whose episode ends
        self._ticks = 0
        self._began = np.zeros(num_envs, np.int64)  # the tick at which the slot's episode began
        self._actions = _legal_actions(action_space, num_envs)
        self._in_parts = False
        self._started = False
        self._failures: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._closed = self._freed = False

    # ------------------------------------------------------------------ for subclasses

    copies_obs = True
    """False if the arrays that ``_vector_step`` returns are never written to again."""

    resets_by_stepping = False
    """Whether a slot that ended is reset by the next step, and by nothing else."""

    @abstractmethod
    def _vector_reset(self) -> tuple[Tree, Mapping[int, dict[str, Any]]]:
        """The first observations [B, ...] and infos by slot."""

    @abstractmethod
    def _vector_step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, Any]:
        """``(obs, rewards, terminated, truncated, infos)`` as the user's env returned them."""

    @abstractmethod
    def _read_infos(self, infos: Any, obs: Tree, ended: np.ndarray) -> dict[int, dict[str, Any]]:
        """Infos by slot; puts true final observations into ``obs`` where the user's env keeps them in its infos."""

    @abstractmethod
    def _reset_slots(self, ids: np.ndarray) -> StepBatch | None:
        """See ``try_reset``; the ids are checked."""

    @abstractmethod
    def _close_env(self) -> None:
        """Closes the user's env."""

    def _interrupt(self) -> None:
        """Called by ``close`` if a step takes too long: ends it if that is possible."""

    # ------------------------------------------------------------------ the polled interface

    def poll(self, timeout_s: float | None = None) -> StepBatch:
        return self._exclusively(self._poll)

    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        self._require_open()
        ids = self._states.require_waiting(env_ids)
        batch = self._codec.checked_copy(actions, ids)
        if ids is self.all_ids:
            self._actions = batch
            self._states.code.fill(BUSY)
        elif len(ids):
            if not self._in_parts:  # the env may have kept the last batch
                self._actions, self._in_parts = map_tree(np.copy, self._actions), True
            assign(self._actions, ids, batch)
            self._states.code[ids] = BUSY

    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        ids = self._states.require_resettable(env_ids)
        return self._exclusively(self._reset_slots, ids) if len(ids) else None

    def turn(self, actions: Tree, reset: bool = False) -> StepBatch:
        """``send_actions`` to every slot that waits for one, and ``poll``, in one call: for callers in step.

        Args:
            actions: tree [B, ...], B = num_envs; those of slots that are being reset are checked and ignored.
            reset: slots that end are reset by the next turn, as after a ``try_reset`` that returned None. Only for an
                env that ``resets_by_stepping``.
        """
        self._require_open()
        self._actions, self._in_parts = self._codec.checked_copy(actions, self.all_ids), False
        self._after_end = RESETTING if reset else ENDED
        try:
            return self._exclusively(self._turn)
        finally:
            self._after_end = ENDED

    def begin_anew(self) -> None:
        """Makes every slot new, whatever a call that broke off (Ctrl-C) left: the next poll resets all envs at once.

        Envs are not seeded again, so that they do not repeat their first episodes.
        """
        self._seeds = [None] * self.num_envs
        self._states.code.fill(NEW)
        self._failures.clear()
        self._started = self._in_parts = False

    def reset_slots(self, slots: np.ndarray) -> StepBatch | None:
        """``try_reset`` of slots (int64[K], distinct) that had a row in the last poll, without looking them up."""
        return self._exclusively(self._reset_slots, slots)

    def try_restart(self, env_ids: np.ndarray) -> None:
        self._require_open()
        for slot in self._states.require_failed(env_ids).tolist():
            failure = self._failures[slot]
            step = getattr(failure, "episode_step", None)
            raise EnvFailedError(
                f"{failure} (one slot of a vector env cannot be restarted)", slot=slot, episode_step=step
            ) from failure

    def close(self) -> None:
        self._closed = True
        if not self._lock.acquire(timeout=_CLOSE_WAIT_S):
            self._interrupt()
            if not self._lock.acquire(timeout=_CLOSE_WAIT_S):
                return  # the poll that holds the lock closes the env when its step ends
        try:
            self._free()
        finally:
            self._lock.release()

    env: Any
    """The user's env."""

    _saved: tuple[str, ...] = ("env", "_ticks", "_began", "_actions", "_in_parts", "_started")

    def get_state(self) -> bytes | None:
        """None in mid-step, after a failure, and if the env does not pickle with its state."""
        codes = self._states.code.tobytes()
        if BUSY in codes or FAILED in codes:
            return None
        state = {name: getattr(self, name) for name in self._saved}
        return pickled((codes, state), [self.env, *self.sub_envs()])

    def set_state(self, state: bytes) -> None:
        codes, saved = pickle.loads(state)
        if len(codes) != self.num_envs:
            raise SpaceError(f"the saved state is of {len(codes)} slots, not {self.num_envs}")
        self._close_env()
        for name in self._saved:
            setattr(self, name, saved[name])
        self._states.code[:] = np.frombuffer(codes, np.int8)

    # ------------------------------------------------------------------ inside

    def _exclusively(self, work: Callable[..., Any], *args: Any) -> Any:
        """Runs ``work`` so that no other thread closes the env under it."""
        with self._lock:
            self._require_open()
            try:
                result = work(*args)
            except Exception as e:
                if self._closed:
                    raise EnvClosedError("the env was closed during this call") from e
                raise
            finally:
                if self._closed:
                    self._free()
            if self._closed:
                raise EnvClosedError("the env was closed during this call")
            return result

    def _require_open(self) -> None:
        if self._closed:
            raise EnvClosedError("the env is closed")

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            self._close_env()

    def _poll(self) -> StepBatch:
        if not self._started:
            self._started = True
            try:
                obs, infos = self._vector_reset()
                obs = self._writer.copy_batch(obs, self.num_envs, self.copies_obs)
            except Exception as e:
                return self._all_failed(e, "reset", None)
            return self._first_rows(self.all_ids, obs, infos)
        codes = self._states.code.tobytes()
        if codes == self._all_busy:
            return self._step(None)
        if BUSY not in codes and RESETTING not in codes:
            raise self._states.nothing_pending()
        if WAITING in codes or ENDED in codes:
            raise EnvProtocolError(
                f"these slots step together, so poll needs an action or a reset for each: {self._states.describe()}"
            )
        return self._step(self._states.code != BUSY)

    def _turn(self) -> StepBatch:
        """``_poll`` once each waiting slot has its action."""
        code = self._states.code
        codes = code.tobytes()
        waiting = codes.count(WAITING)
        if waiting == self.num_envs:
            return self._step(None)
        if waiting + codes.count(RESETTING) == self.num_envs:
            return self._step(code == self._all_resetting)
        code[code == WAITING] = BUSY
        return self._poll()

    def _step(self, unasked: np.ndarray | None) -> StepBatch:
        """Steps all; ``unasked`` (bool[B]) marks resetting and failed slots, None: there are none."""
        self._in_parts = False
        asked = None if unasked is None else ~unasked
        try:
            obs, rewards, terminated, truncated, infos = self._vector_step(self._actions)
            obs = self._writer.copy_batch(obs, self.num_envs, self.copies_obs)
            rewards, failures = self._reward_column(rewards)
            terminated = _flags(terminated, "terminated", self.num_envs, asked)
            truncated = _flags(truncated, "truncated", self.num_envs, asked)
            if unasked is not None:
                rewards[unasked.nonzero()[0]] = 0
                if failures:
                    failures = {s: f for s, f in failures.items() if not unasked[s]}
            ended = terminated | truncated
            row_infos = self._read_infos(infos, obs, ended)
        except Exception as e:
            return self._all_failed(e, "step", 1)
        first, dead = self._advance(unasked, ended)
        batch = StepBatch(self.all_ids, obs, rewards, terminated, truncated, first, row_infos)
        return self._checked(batch, failures, dead)

    def _advance(self, unasked: np.ndarray | None, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Moves every slot one step on; returns which rows are first ones, and which slots had failed before."""
        code = self._states.code
        self._ticks += 1
        dead = None
        if unasked is None:
            first = self._none
        else:
            first = unasked
            if FAILED in code.tobytes():
                first, dead = code == RESETTING, code == FAILED
            self._began[first.nonzero()[0]] = self._ticks
        code.fill(WAITING)
        if 1 in ended.tobytes():
            code[ended] = self._after_end
        if dead is not None:
            code[dead] = FAILED
        return first, dead

    def _episode_step(self, slot: int) -> int:
        """Steps taken in the slot's running episode."""
        return self._ticks - int(self._began[slot])

    def _first_rows(self, ids: np.ndarray, obs: Tree, infos: Mapping[int, dict[str, Any]]) -> StepBatch:
        """A batch of first observations ``obs`` (owned, tree [K, ...]); ``infos`` by slot."""
        count = len(ids)
        rows = {row: infos[slot] for row, slot in enumerate(ids.tolist()) if infos.get(slot)} if infos else {}
        self._states.code[ids] = WAITING
        self._began[ids] = self._ticks
        no = np.zeros(count, bool)
        return self._checked(StepBatch(ids, obs, np.zeros(count, np.float32), no, no.copy(), ~no, rows), {}, None)

    def _checked(self, batch: StepBatch, failures: dict[int, BaseException], dead: np.ndarray | None) -> StepBatch:
        """The batch less the rows of slots that failed now or before."""
        if not self._allow_nonfinite:
            for row, path, value in nonfinite_rows(batch.obs):
                slot = int(batch.env_ids[row])
                where = f" at {path}" if path else ""
                step = None if batch.is_first[row] else self._episode_step(slot)
                at = f"slot {slot}" + ("" if step is None else f", episode step {step}")
                what = f"{at}: observation{where} holds {value}; mend the env, or set allow_nonfinite=True"
                failures.setdefault(slot, EnvFailedError(what, slot=slot, episode_step=step))
        if dead is None:
            if not failures:
                return batch
        else:
            failures = {slot: f for slot, f in failures.items() if not dead[slot]}
        self._failures.update(failures)
        self._states.code[list(failures)] = FAILED
        good = np.flatnonzero(self._states.code[batch.env_ids] != FAILED)
        infos = {new: batch.infos[old] for new, old in enumerate(good.tolist()) if old in batch.infos}
        obs = gather(batch.obs, good)
        ids, rewards, terminated, truncated, first = (column[good] for column in (batch.env_ids, *batch[2:6]))
        return StepBatch(ids, obs, rewards, terminated, truncated, first, infos, failures)

    def _all_failed(self, error: Exception, call: str, ahead: int | None) -> StepBatch:
        """No row, and a failure for each slot that had not failed before."""
        if self._closed:
            raise error
        failures: dict[int, BaseException] = {}
        for slot in np.flatnonzero(self._states.code != FAILED).tolist():
            step = None if ahead is None else self._episode_step(slot) + ahead
            at = f"slot {slot}" + ("" if step is None else f", episode step {step}")
            bad = isinstance(error, SpaceError)
            what = f"returned a bad batch: {error}" if bad else f"raised {type(error).__name__}: {error}"
            failure = EnvFailedError(f"{at}: the vector env's {call} {what}", slot=slot, episode_step=step)
            failure.__cause__ = error
            failures[slot] = failure
        self._failures.update(failures)
        self._states.code.fill(FAILED)
        no = np.zeros(0, bool)
        obs = zeros_columns(self.observation_space, (0,))
        return StepBatch(self.all_ids[:0], obs, np.zeros(0, np.float32), no, no.copy(), no.copy(), {}, failures)

    def _reward_column(self, rewards: Any) -> tuple[np.ndarray, dict[int, BaseException]]:
        """float32[B] and the failures of slots whose reward is no finite number."""
        count = self.num_envs
        if type(rewards) is np.ndarray and rewards.dtype == _FLOAT32 and rewards.shape == (count,):
            column = rewards.copy()
            if self._allow_nonfinite or math.isfinite(np.vdot(column, column)):
                return column, {}
        try:
            array = np.asarray(rewards)
        except ValueError:  # a list of unlike things
            array = np.empty(0)
        if array.dtype.kind in "fiub" and array.shape in ((count,), (count, 1)):
            with np.errstate(over="ignore"):
                column = array.reshape(count).astype(np.float32)
            if self._allow_nonfinite or math.isfinite(np.vdot(column, column)):
                return column, {}
        elif not isinstance(rewards, (list, tuple)) or len(rewards) != count:
            got = f"shape {array.shape} of {array.dtype}" if hasattr(rewards, "shape") else type(rewards).__name__
            raise SpaceError(f"rewards are {got}, expected {count} numbers")
        column = np.zeros(count, np.float32)
        failures: dict[int, BaseException] = {}
        for slot in range(count):
            try:
                step = self._episode_step(slot) + 1
                column[slot] = coerce_reward(rewards[slot], slot, step, self._allow_nonfinite)
            except EnvFailedError as e:
                failures[slot] = e
        return column, failures


def _flags(flags: Any, name: str, count: int, asked: np.ndarray | None) -> np.ndarray:
    """bool[count], a copy; False where not ``asked`` (bool[count]; None: all are)."""
    if type(flags) is not np.ndarray or flags.dtype != _BOOL or flags.shape != (count,):
        array = np.array(flags)
        if array.shape != (count,) or array.dtype.kind not in "biu":
            raise SpaceError(f"{name} is of shape {array.shape} and {array.dtype}, expected bool[{count}]")
        flags = array.astype(bool)
    return flags.copy() if asked is None else flags & asked


def _legal_actions(space: gymnasium.Space[Any], count: int) -> Tree:
    """A legal action for each slot, for a slot that is stepped before it was ever sent one."""
    mine = copy.deepcopy(space)
    mine.seed(0)
    action, columns = mine.sample(), zeros_columns(space, (count,))
    writer = ObsWriter(space)
    for slot in range(count):
        writer.write(columns, slot, action, slot, None)
    return columns
