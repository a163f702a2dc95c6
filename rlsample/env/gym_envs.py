"""Gymnasium envs in this process, stepped one after the other inside poll."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.base_env import BaseEnv, EnvContext, StepBatch, slot_seed
from rlsample.env.env_settings import EnvSettings
from rlsample.env.gym_wrappers import all_bools, all_dicts, bad_result, coerce_flags, coerce_info, peel
from rlsample.env.pool.env_plan import require_same_spaces
from rlsample.env.quick_contains import quicken
from rlsample.env.saved_state import pickled
from rlsample.env.slot_failures import not_finite, raised
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec, ObsWriter, coerce_reward, empty_columns, nonfinite_rows
from rlsample.env.step_batches import merge, without_slots
from rlsample.errors import EnvClosedError, EnvFailedError, SpaceError
from rlsample.tree import Tree

__all__ = ["GymEnvs"]

_CLOSE_WAIT_S = 1.0
_BLANK = (None, 0.0, False, False, None)
_NO_INFOS: dict[int, Any] = {}


class GymEnvs(BaseEnv):
    """``num_envs`` gymnasium envs behind the polled interface; resets are immediate.

    Args:
        make: builds the env of one slot; called exactly once per slot and incarnation.
        num_envs: slots.
        settings: ``env_config`` goes to the factories; ``allow_nonfinite``, ``max_restarts`` and ``restart_backoff_s``
            are obeyed here.
        seed: see :func:`~rlsample.env.base_env.slot_seed`; None lets each env seed itself.
        worker_index: the evaluator's index, for seeds and contexts.

    Raises:
        EnvFailedError: a constructor raised; the envs built before are closed.
        SpaceError: a space without fixed size, or slots that differ in their spaces.
    """

    def __init__(
        self,
        make: Callable[[EnvContext], gymnasium.Env[Any, Any]],
        num_envs: int,
        *,
        settings: EnvSettings | None = None,
        seed: int | None = None,
        worker_index: int = 0,
    ) -> None:
        self.num_envs = num_envs
        self._settings = settings or EnvSettings()
        self._make, self._seed, self._worker_index = make, seed, worker_index
        self._states = SlotStates(num_envs)
        self.all_ids = self._states.all_ids
        self._incarnation = [0] * num_envs
        self._not_before = [0.0] * num_envs
        self._rounds = 0  # steps that all slots took together
        self._started_at = np.zeros(num_envs, np.int64)  # a slot's episode step is _rounds - _started_at
        self._no_flags = np.zeros(num_envs, bool)
        self._all_flags = ~self._no_flags
        self._no_rewards = np.zeros(num_envs, np.float32)
        for shared in (self._no_flags, self._all_flags, self._no_rewards):
            shared.flags.writeable = False
        self._seeded = [False] * num_envs
        self._num_resetting = num_envs  # slots that are new or wait for a reset inside poll
        self._failures: dict[int, EnvFailedError] = {}
        self._sent: tuple[np.ndarray, list[Any]] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._closing = threading.Event()
        self._envs: list[gymnasium.Env[Any, Any] | None] = []
        try:
            for slot in range(num_envs):
                self._envs.append(self._build(slot))
            self._read_spaces()
        except BaseException:
            self.close()
            raise

    def _read_spaces(self) -> None:
        first = self._envs[0]
        assert first is not None
        self.observation_space, self.action_space = first.observation_space, first.action_space
        for env in self._envs:
            quicken(env)
        peeled = [peel(env) for env in self._envs]  # type: ignore[arg-type]
        self._steps = [step for step, _ in peeled]
        self._limits = np.array([limit for _, limit in peeled])
        self._find_next_limit()
        self._writer = ObsWriter(first.observation_space, any_size=True)
        self._codec = ActionCodec(first.action_space, any_size=True)
        shape, dtype = self._writer.shape, self._writer.dtype
        self._checks_obs = dtype is not None and dtype.kind == "f"
        self._row_lengths = {shape[0]} if shape else set()  # empty: observations are written one by one
        for slot, env in enumerate(self._envs):
            require_same_spaces(env, slot, (self.observation_space, self.action_space), 0)

    # ------------------------------------------------------------------ the polled interface

    def poll(self, timeout_s: float | None = None) -> StepBatch:
        with self._lock:
            if self._closed:
                raise EnvClosedError("the env is closed")
            try:
                sent = self._sent
                if sent is None or self._num_resetting:
                    return self._poll_mixed(timeout_s)
                self._sent = None
                return self._step(*(sent if sent[0] is self.all_ids else self._in_order(*sent)))
            except KeyboardInterrupt:  # the rows are lost, and so is the rest of their episodes
                self._sent, code = None, self._states.code
                code[code == BUSY] = ENDED
                self._num_resetting = int(((code == NEW) | (code == RESETTING)).sum())
                raise
            finally:
                if self._closed:
                    self._close_envs()

    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        self._require_open()
        ids = self._states.require_waiting(env_ids)
        split = self._codec.check_and_split(actions, ids)
        if ids is self.all_ids:
            self._sent = (ids, split)
            self._states.code.fill(BUSY)
        elif len(ids):
            earlier = self._sent
            self._sent = (ids, split) if earlier is None else (np.concatenate([earlier[0], ids]), earlier[1] + split)
            self._states.code[ids] = BUSY

    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        with self._lock:
            self._require_open()
            ids = self._states.require_resettable(env_ids)
            return self._reset(ids) if len(ids) else None

    def try_restart(self, env_ids: np.ndarray) -> None:
        self._require_open()
        ids = self._states.require_failed(env_ids).tolist()
        for slot in ids:
            if self._incarnation[slot] >= self._settings.max_restarts:
                failure = self._failures[slot]
                budget = f"max_restarts={self._settings.max_restarts}"
                raise EnvFailedError(
                    f"{failure} (no restart left: {budget})", slot=slot, episode_step=failure.episode_step
                ) from failure
        for slot in ids:
            self._not_before[slot] = time.monotonic() + self._settings.back_off_s(self._incarnation[slot])
            self._incarnation[slot] += 1
            self._seeded[slot] = False
            with contextlib.suppress(Exception):  # it is broken; what matters is the new one
                self._close_one(slot)
            self._states.code[slot] = RESETTING
        self._num_resetting += len(ids)

    def close(self) -> None:
        self._closed = True
        self._closing.set()
        if self._lock.acquire(timeout=_CLOSE_WAIT_S):  # else the poll that holds it closes the envs when its step ends
            try:
                self._close_envs()
            finally:
                self._lock.release()

    # ------------------------------------------------------------------ stepping

    def _step(self, ids: np.ndarray, actions: list[Any]) -> StepBatch:
        everyone = ids is self.all_ids
        slots: Any = range(self.num_envs) if everyone else ids.tolist()
        failures: dict[int, EnvFailedError] = {}
        results = self._call_steps(slots, actions, failures)
        if everyone:
            self._rounds += 1
            self._states.code.fill(WAITING)
        else:
            self._started_at[ids] -= 1
            self._states.code[ids] = WAITING
            self._find_next_limit()
        obs, rewards, told, infos = self._columns(slots, results, failures)
        no = self._no_flags[: len(results)]
        flags = (no, no)
        if told or self._rounds >= self._next_limit:
            flags = self._flags(ids, *(told or flags))
        sparse = _NO_INFOS if infos is None else {row: info for row, info in enumerate(infos) if info}
        batch = StepBatch(ids, obs, rewards, *flags, no, sparse)
        return self._without_failed(batch, failures) if failures else batch

    def _call_steps(self, slots: Any, actions: list[Any], failures: dict[int, EnvFailedError]) -> list[Any]:
        """One result for each slot; a blank one, and an entry in ``failures``, for a slot that raised."""
        steps = self._steps if type(slots) is range else [self._steps[slot] for slot in slots]
        results: list[Any] = []
        append = results.append
        pairs = zip(steps, actions, strict=True)
        while len(results) < len(actions):
            try:
                for step, action in pairs:
                    append(step(action))
                    if self._closed:
                        break
            except Exception as e:
                slot = slots[len(results)]
                failures[slot] = raised(slot, e, "step", self._steps_taken(slot) + 1)
                append(_BLANK)
            if self._closed:
                raise EnvClosedError("the env was closed while poll was stepping it")
        return results

    def _columns(
        self, slots: Any, results: list[Any], failures: dict[int, EnvFailedError]
    ) -> tuple[Tree, np.ndarray, tuple[Any, Any] | None, Any]:
        """Observations and rewards as columns; flags and infos as sequences, None where they say nothing."""
        count = len(results)
        shape = self._writer.shape
        if shape and not failures:
            try:
                all_obs, all_rewards, terminated, truncated, infos = zip(*results, strict=True)
                obs = np.empty((count * shape[0], *shape[1:]), self._writer.dtype)
                np.concatenate(all_obs, out=obs, casting="no")
                rewards = np.array(all_rewards, np.float32)
                if set(map(len, all_obs)) == self._row_lengths and rewards.ndim == 1:
                    obs = obs.reshape(count, *shape)
                    # squares summed are finite only if all entries are; else the exact check decides
                    flat = obs.ravel() if self._checks_obs else rewards
                    if self._settings.allow_nonfinite or (isfinite(flat.dot(flat)) and isfinite(rewards.dot(rewards))):
                        told, informed = any(terminated) or any(truncated), any(infos)
                        if (not told or all_bools(terminated, truncated)) and (not informed or all_dicts(infos)):
                            return obs, rewards, (terminated, truncated) if told else None, infos if informed else None
            except (TypeError, ValueError):
                pass
        return self._columns_one_by_one(slots, results, failures)

    def _columns_one_by_one(
        self, slots: Any, results: list[Any], failures: dict[int, EnvFailedError]
    ) -> tuple[Tree, np.ndarray, tuple[Any, Any] | None, Any]:
        """As :meth:`_columns`, with every result checked by itself and the faulty ones in ``failures``."""
        count = len(results)
        obs, rewards = empty_columns(self.observation_space, (count,)), np.zeros(count, np.float32)
        terminated, truncated = [False] * count, [False] * count
        infos: list[Any] = [None] * count
        allow = self._settings.allow_nonfinite
        for row, (slot, result) in enumerate(zip(slots, results, strict=True)):
            if slot in failures:
                continue
            step = self._steps_taken(slot)
            try:
                if not isinstance(result, tuple) or len(result) != 5:
                    raise EnvFailedError(bad_result(result, slot, step), slot=slot, episode_step=step)
                ob, reward, term, trunc, info = result
                self._writer.write(obs, row, ob, slot, step)
                rewards[row] = coerce_reward(reward, slot, step, allow)
                terminated[row], truncated[row] = coerce_flags(term, trunc, slot, step)
                infos[row] = coerce_info(info, slot, step)
            except Exception as e:
                failures[slot] = raised(slot, e, "step", step)
        if not allow:
            self._find_nonfinite(slots, obs, failures)
        return obs, rewards, (terminated, truncated), infos

    def _flags(self, ids: np.ndarray, terminated: Any, truncated: Any) -> tuple[np.ndarray, np.ndarray]:
        term, trunc = np.array(terminated, bool), np.array(truncated, bool)
        if self._rounds >= self._next_limit:
            trunc |= self._rounds - self._started_at[ids] >= self._limits[ids]
            self._find_next_limit()
        self._states.code[ids[term | trunc]] = ENDED
        return term, trunc

    def _find_next_limit(self) -> None:
        """The round before which no slot can reach its time limit; resets only make it later."""
        self._next_limit = int((self._started_at + self._limits).min())

    def _find_nonfinite(self, slots: Any, obs: Tree, failures: dict[int, EnvFailedError]) -> None:
        for row, path, value in nonfinite_rows(obs):
            slot = int(slots[row])
            failures.setdefault(slot, not_finite(slot, self._steps_taken(slot), path, value))

    def _steps_taken(self, slot: int) -> int:
        return self._rounds - int(self._started_at[slot])

    def _without_failed(self, batch: StepBatch, failures: dict[int, EnvFailedError]) -> StepBatch:
        """The batch less the rows of failed slots, which become FAILED."""
        for slot, failure in failures.items():
            self._failures[slot] = failure
            self._states.code[slot] = FAILED
        return without_slots(batch, failures)

    # ------------------------------------------------------------------ starting and restarting

    def _poll_mixed(self, timeout_s: float | None) -> StepBatch:
        """Actions that were sent and resets that are due, as one batch."""
        sent, self._sent = self._sent, None
        parts = [] if sent is None else [self._step(*self._in_order(*sent))]
        slots = np.flatnonzero((self._states.code == NEW) | (self._states.code == RESETTING)).tolist()
        if not parts and not slots:
            raise self._states.nothing_pending()
        due = [s for s in slots if self._not_before[s] <= time.monotonic()]
        if not due and not parts:
            wait_s = min(self._not_before[s] for s in slots) - time.monotonic()
            self._closing.wait(max(0.0, wait_s if timeout_s is None else min(wait_s, timeout_s)))
            self._require_open()
            if timeout_s is not None and timeout_s < wait_s:
                return self._reset(self.all_ids[:0])
            due = [s for s in slots if self._not_before[s] <= time.monotonic()]
        if due:
            self._num_resetting -= len(due)
            parts.append(self._reset(self.all_ids if len(due) == self.num_envs else np.array(due)))
        return parts[0] if len(parts) == 1 else merge(parts)

    def _reset(self, ids: np.ndarray) -> StepBatch:
        count, obs = len(ids), empty_columns(self.observation_space, (len(ids),))
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, EnvFailedError] = {}
        for row, slot in enumerate(ids.tolist()):
            try:
                env = self._envs[slot]
                if env is None:
                    self._envs[slot] = env = self._build(slot)
                    require_same_spaces(env, slot, (self.observation_space, self.action_space), None)
                    quicken(env)
                    self._steps[slot], self._limits[slot] = peel(env)
                ob, info = env.reset(seed=None if self._seeded[slot] else self._first_seed(slot))
                self._writer.write(obs, row, ob, slot, None)
                if info := coerce_info(info, slot, None):
                    infos[row] = info
            except Exception as e:
                failures[slot] = raised(slot, e, "reset")
        self._states.code[ids] = WAITING
        self._started_at[ids] = self._rounds
        if not self._settings.allow_nonfinite:
            self._find_nonfinite(ids, obs, failures)
        no = self._no_flags[:count]
        batch = StepBatch(ids, obs, self._no_rewards[:count], no, no, self._all_flags[:count], infos)
        return self._without_failed(batch, failures) if failures else batch

    def _first_seed(self, slot: int) -> int | None:
        if self._seeded[slot]:
            return None
        self._seeded[slot] = True
        return slot_seed(self._seed, self._worker_index, slot, self._incarnation[slot])

    def _build(self, slot: int) -> gymnasium.Env[Any, Any]:
        settings = self._settings
        context = EnvContext(self._worker_index, slot, self.num_envs, self._incarnation[slot], settings.env_config)
        try:
            return self._make(context)
        except EnvFailedError:
            raise
        except Exception as e:
            raise raised(slot, e, "__init__") from e

    # ------------------------------------------------------------------ the rest

    def get_state(self) -> bytes | None:
        """None if an env does not pickle with its state (EzPickle envs such as Atari and Box2D lose theirs)."""
        if self._sent is not None:
            return None
        rest = (self._states.code, self._rounds - self._started_at, self._incarnation, self._seeded)
        return pickled((self._envs, rest), self._envs)

    def set_state(self, state: bytes) -> None:
        envs, (code, steps, incarnation, seeded) = pickle.loads(state)
        if len(envs) != self.num_envs:
            raise SpaceError(f"the saved state is of {len(envs)} envs, not {self.num_envs}")
        for slot in range(self.num_envs):
            self._close_one(slot)
        self._envs, self._incarnation, self._seeded = envs, incarnation, seeded
        self._states.code[:], self._started_at[:] = code, self._rounds - steps
        self._read_spaces()
        self._num_resetting = int(np.count_nonzero((code == NEW) | (code == RESETTING)))

    def sub_envs(self) -> list[Any]:
        return list(self._envs)

    def _in_order(self, ids: np.ndarray, actions: list[Any]) -> tuple[np.ndarray, list[Any]]:
        order = np.argsort(ids)
        return (self.all_ids if len(ids) == self.num_envs else ids[order]), [actions[i] for i in order]

    def _require_open(self) -> None:
        if self._closed:
            raise EnvClosedError("the env is closed")

    def _close_one(self, slot: int) -> None:
        env, self._envs[slot] = self._envs[slot], None
        if env is not None:
            env.close()

    def _close_envs(self) -> None:
        errors = []
        for slot in range(len(self._envs)):
            try:
                self._close_one(slot)
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]
