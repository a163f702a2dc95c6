"""Gymnasium envs in this process, stepped one after the other inside poll."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

from rlsample.env.base_env import BaseEnv, EnvContext, StepBatch, slot_seed
from rlsample.env.env_settings import EnvSettings
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec, ObsWriter, check_finite, coerce_reward, empty_columns, nonfinite_rows
from rlsample.errors import EnvClosedError, EnvFailedError, SpaceError
from rlsample.tree import Tree, concat, gather

__all__ = ["GymEnvs"]

_CLOSE_WAIT_S = 1.0


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
        self._episode_steps = np.zeros(num_envs, np.int64)
        self._seeded = [False] * num_envs
        self._failures: dict[int, EnvFailedError] = {}
        self._sent: tuple[np.ndarray, list[Any]] | None = None
        self._lock = threading.Lock()
        self._closed = False
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
        self._writer, self._codec = ObsWriter(first.observation_space), ActionCodec(first.action_space)
        for slot, env in enumerate(self._envs):
            for mine, want in ((env.observation_space, self.observation_space), (env.action_space, self.action_space)):  # type: ignore[union-attr]
                if mine is not want and mine != want:
                    raise SpaceError(f"slot {slot} has space {mine}, slot 0 has {want}: all slots need the same spaces")

    # ------------------------------------------------------------------ the polled interface

    def poll(self, timeout_s: float | None = None) -> StepBatch:
        with self._lock:
            self._require_open()
            try:
                if self._sent is not None and not self._resets_pending():
                    return self._step(*self._take_sent())
                return self._poll_mixed(timeout_s)
            finally:
                if self._closed:
                    self._close_envs()

    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        self._require_open()
        ids = self._states.require_waiting(env_ids)
        split = self._codec.check_and_split(actions, ids)
        if ids is self.all_ids:
            self._states.code.fill(BUSY)
            self._sent = (ids, split)
        elif len(ids):
            self._states.code[ids] = BUSY
            earlier = self._sent
            self._sent = (ids, split) if earlier is None else (np.concatenate([earlier[0], ids]), earlier[1] + split)

    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        with self._lock:
            self._require_open()
            ids = self._states.require_resettable(env_ids)
            return self._reset(ids.tolist()) if len(ids) else None

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
            back_off = self._settings.restart_backoff_s * 2 ** self._incarnation[slot]
            self._not_before[slot] = time.monotonic() + back_off
            self._incarnation[slot] += 1
            self._seeded[slot] = False
            self._close_one(slot)
            self._states.code[slot] = RESETTING

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(timeout=_CLOSE_WAIT_S):  # else the poll that holds it closes the envs when its step ends
            try:
                self._close_envs()
            finally:
                self._lock.release()

    # ------------------------------------------------------------------ stepping

    def _step(self, ids: np.ndarray, actions: list[Any]) -> StepBatch:
        count = len(actions)
        obs = empty_columns(self.observation_space, (count,)) if self._writer.shape is None else self._empty(count)
        slots: Any = range(self.num_envs) if ids is self.all_ids else ids.tolist()
        rewards: list[Any] = []
        ends: list[tuple[int, Any, Any]] = []
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, EnvFailedError] = {}
        envs, writer = self._envs, self._writer
        shape, dtype, plain = writer.shape, writer.dtype, np.ndarray
        row = 0
        for slot, action in zip(slots, actions, strict=True):
            try:
                ob, reward, terminated, truncated, info = envs[slot].step(action)  # type: ignore[union-attr]
                if type(ob) is plain and ob.dtype == dtype and ob.shape == shape:
                    obs[row] = ob
                else:
                    writer.write(obs, row, ob, slot, int(self._episode_steps[slot]) + 1)
            except Exception as e:
                failures[slot] = self._failure(slot, e, "step")
                reward, terminated, truncated, info = 0.0, False, False, None
            rewards.append(reward)
            if terminated or truncated:
                ends.append((row, terminated, truncated))
            if info:
                infos[row] = info
            row += 1
            if self._closed:
                raise EnvClosedError("the env was closed while poll was stepping it")
        return self._outcome(ids, obs, rewards, ends, infos, failures)

    def _outcome(
        self,
        ids: np.ndarray,
        obs: Tree,
        rewards: list[Any],
        ends: list[tuple[int, Any, Any]],
        infos: dict[int, dict[str, Any]],
        failures: dict[int, EnvFailedError],
    ) -> StepBatch:
        count = len(rewards)
        terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
        everyone = ids is self.all_ids
        if everyone:
            self._episode_steps += 1
            self._states.code.fill(WAITING)
        else:
            self._episode_steps[ids] += 1
            self._states.code[ids] = WAITING
        for row, term, trunc in ends:
            terminated[row], truncated[row] = bool(term), bool(trunc)
            self._states.code[ids[row]] = ENDED
        reward_column = self._rewards(ids, rewards, failures)
        if not self._settings.allow_nonfinite:
            for row, path, value in nonfinite_rows(obs):
                slot = int(ids[row])
                if slot not in failures:
                    failures[slot] = self._not_finite(slot, path, value)
        batch = StepBatch(ids, obs, reward_column, terminated, truncated, np.zeros(count, bool), infos)
        return self._without_failed(batch, failures) if failures else batch

    def _rewards(self, ids: np.ndarray, rewards: list[Any], failures: dict[int, EnvFailedError]) -> np.ndarray:
        try:
            column = np.array(rewards, np.float32)
            if column.ndim == 1 and (self._settings.allow_nonfinite or np.isfinite(column.dot(column))):
                return column
        except (TypeError, ValueError):
            pass
        column = np.zeros(len(rewards), np.float32)
        for row, reward in enumerate(rewards):
            slot = int(ids[row])
            try:
                steps = int(self._episode_steps[slot])
                column[row] = coerce_reward(reward, slot, steps, self._settings.allow_nonfinite)
            except EnvFailedError as e:
                failures.setdefault(slot, e)
        return column

    def _without_failed(self, batch: StepBatch, failures: dict[int, EnvFailedError]) -> StepBatch:
        """The batch less the rows of failed slots, which become FAILED."""
        for slot, failure in failures.items():
            self._failures[slot] = failure
            self._states.code[slot] = FAILED
        good = np.flatnonzero([slot not in failures for slot in batch.env_ids.tolist()])
        infos = {new: batch.infos[old] for new, old in enumerate(good.tolist()) if old in batch.infos}
        columns = [gather(column, good) for column in batch[:6]]
        return StepBatch(*columns, infos, dict(failures))

    # ------------------------------------------------------------------ starting and restarting

    def _poll_mixed(self, timeout_s: float | None) -> StepBatch:
        """Actions that were sent and resets that are due, as one batch."""
        parts = [] if self._sent is None else [self._step(*self._take_sent())]
        slots = np.flatnonzero((self._states.code == NEW) | (self._states.code == RESETTING)).tolist()
        if not parts and not slots:
            raise self._states.nothing_pending()
        due = [s for s in slots if self._not_before[s] <= time.monotonic()]
        if not due and not parts:
            wait_s = min(self._not_before[s] for s in slots) - time.monotonic()
            if timeout_s is not None and timeout_s < wait_s:
                time.sleep(timeout_s)
                return self._reset([])
            time.sleep(max(0.0, wait_s))
            due = [s for s in slots if self._not_before[s] <= time.monotonic()]
        if due:
            parts.append(self._reset(due))
        return parts[0] if len(parts) == 1 else _merge(parts)

    def _reset(self, slots: list[int]) -> StepBatch:
        obs = empty_columns(self.observation_space, (len(slots),))
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, EnvFailedError] = {}
        for row, slot in enumerate(slots):
            try:
                env = self._envs[slot]
                if env is None:
                    self._envs[slot] = env = self._build(slot)
                ob, info = env.reset(seed=self._first_seed(slot))
                self._writer.write(obs, row, ob, slot, None)
                if not self._settings.allow_nonfinite:
                    check_finite(gather(obs, slice(row, row + 1)), [slot])
                if info:
                    infos[row] = info
            except Exception as e:
                failures[slot] = self._failure(slot, e, "reset")
        everyone = len(slots) == self.num_envs
        ids = self.all_ids if everyone and slots == list(range(self.num_envs)) else np.array(slots, np.int64)
        self._states.code[ids] = WAITING
        self._episode_steps[ids] = 0
        none = np.zeros(len(slots), bool)
        batch = StepBatch(ids, obs, np.zeros(len(slots), np.float32), none, none.copy(), ~none, infos)
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
            raise self._failure(slot, e, "__init__") from e

    def _failure(self, slot: int, error: Exception, where: str) -> EnvFailedError:
        if isinstance(error, EnvFailedError):
            return error
        if where == "step":
            step = int(self._episode_steps[slot]) + 1
            at = f"slot {slot}, episode step {step}: step"
        else:
            step, at = None, f"slot {slot}: {where}"
        hint = ""
        if where == "step" and isinstance(error, ValueError) and "unpack" in str(error):
            hint = "; an old gym env returns 4 values from step: wrap it with Shimmy (shimmy.GymV21CompatibilityV0)"
        failure = EnvFailedError(f"{at} raised {type(error).__name__}: {error}{hint}", slot=slot, episode_step=step)
        failure.__cause__ = error
        return failure

    def _not_finite(self, slot: int, path: str, value: float) -> EnvFailedError:
        step = int(self._episode_steps[slot])
        where = f" at {path}" if path else ""
        return EnvFailedError(
            f"slot {slot}, episode step {step}: observation{where} holds {value}; mend the env, or set "
            "allow_nonfinite=True",
            slot=slot,
            episode_step=step,
        )

    # ------------------------------------------------------------------ the rest

    def get_state(self) -> bytes | None:
        """None if an env does not pickle with its state (EzPickle envs such as Atari and Box2D lose theirs)."""
        if self._sent is not None or any(e is None or isinstance(e.unwrapped, EzPickle) for e in self._envs):
            return None
        rest = (self._states.code, self._episode_steps, self._incarnation, self._seeded)
        try:
            return pickle.dumps((self._envs, rest))
        except Exception:
            return None

    def set_state(self, state: bytes) -> None:
        envs, (code, steps, incarnation, seeded) = pickle.loads(state)
        if len(envs) != self.num_envs:
            raise SpaceError(f"the saved state is of {len(envs)} envs, not {self.num_envs}")
        for slot in range(self.num_envs):
            self._close_one(slot)
        self._envs, self._incarnation, self._seeded = envs, incarnation, seeded
        self._states.code[:], self._episode_steps[:] = code, steps

    def sub_envs(self) -> list[Any]:
        return list(self._envs)

    def _empty(self, count: int) -> np.ndarray:
        return np.empty((count, *self._writer.shape), self._writer.dtype)  # type: ignore[misc]

    def _resets_pending(self) -> bool:
        codes = self._states.code.tobytes()
        return NEW in codes or RESETTING in codes

    def _take_sent(self) -> tuple[np.ndarray, list[Any]]:
        assert self._sent is not None
        ids, actions = self._sent
        self._sent = None
        if ids is not self.all_ids:
            order = np.argsort(ids)
            ids, actions = ids[order], [actions[i] for i in order]
            if len(ids) == self.num_envs:
                ids = self.all_ids
        return ids, actions

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


def _merge(parts: list[StepBatch]) -> StepBatch:
    infos: dict[int, dict[str, Any]] = {}
    failures: dict[int, BaseException] = {}
    offset = 0
    for part in parts:
        infos.update({row + offset: info for row, info in part.infos.items()})
        failures.update(part.failures)
        offset += len(part.env_ids)
    columns = [concat([part[i] for part in parts]) for i in range(6)]
    return StepBatch(*columns, infos, failures)
