"""Gymnasium envs in this process, stepped one after the other inside poll."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle

from rlsample.env.base_env import BaseEnv, EnvContext, StepBatch, slot_seed
from rlsample.env.env_settings import EnvSettings
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec, ObsWriter, coerce_reward, empty_columns, nonfinite_rows
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
        self._steps = [env.step for env in self._envs]  # type: ignore[union-attr]
        self._checks_finite = (
            isinstance(first.observation_space, gymnasium.spaces.Box)
            and np.dtype(first.observation_space.dtype).kind == "f"
            and not self._settings.allow_nonfinite
        )
        self._writer, self._codec = ObsWriter(first.observation_space), ActionCodec(first.action_space)
        for slot, env in enumerate(self._envs):
            for mine, want in ((env.observation_space, self.observation_space), (env.action_space, self.action_space)):  # type: ignore[union-attr]
                if mine is not want and mine != want:
                    raise SpaceError(f"slot {slot} has space {mine}, slot 0 has {want}: all slots need the same spaces")

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
            finally:
                if self._closed:
                    self._close_envs()

    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        if self._closed:
            raise EnvClosedError("the env is closed")
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
            back_off = self._settings.restart_backoff_s * 2 ** self._incarnation[slot]
            self._not_before[slot] = time.monotonic() + back_off
            self._incarnation[slot] += 1
            self._seeded[slot] = False
            self._close_one(slot)
            self._states.code[slot] = RESETTING
        self._num_resetting += len(ids)

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
        everyone = ids is self.all_ids
        writer = self._writer
        shape, dtype, plain = writer.shape, writer.dtype, np.ndarray
        obs = self._new_obs(count)
        slots: Any = range(self.num_envs) if everyone else ids.tolist()
        steps = self._steps if everyone else [self._steps[slot] for slot in slots]
        rewards: list[Any] = []
        ends: list[tuple[int, Any, Any]] = []
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, EnvFailedError] = {}
        row = 0
        for step, action in zip(steps, actions, strict=True):
            try:
                ob, reward, terminated, truncated, info = step(action)
                if type(ob) is plain and ob.dtype is dtype and ob.shape == shape:
                    obs[row] = ob
                else:
                    writer.write(obs, row, ob, slots[row], self._step_number(slots[row]))
            except Exception as e:
                failures[slots[row]] = self._failure(slots[row], e, "step")
                reward, terminated, truncated, info = 0.0, False, False, None
            rewards.append(reward)
            if terminated or truncated:
                ends.append((row, terminated, truncated))
            if info:
                infos[row] = info
            row += 1
            if self._closed:
                raise EnvClosedError("the env was closed while poll was stepping it")
        if everyone:
            self._rounds += 1
            self._states.code.fill(WAITING)
        else:
            self._started_at[ids] -= 1
            self._states.code[ids] = WAITING
        no = self._no_flags if everyone else self._no_flags[:count]
        flags = self._flags(ids, ends) if ends else (no, no)
        try:
            reward_column = np.array(rewards, np.float32)
            regular = reward_column.ndim == 1 and isfinite(reward_column.dot(reward_column))
        except (TypeError, ValueError):
            regular = False
        if not regular:
            reward_column = self._rewards(ids, rewards, failures)
        if self._checks_finite:
            flat = obs.ravel()
            # squares summed are finite only if all entries are; the exact check follows where they are not
            if not isfinite(flat.dot(flat)):
                self._find_nonfinite(ids, obs, failures)
        elif shape is None and not self._settings.allow_nonfinite:
            self._find_nonfinite(ids, obs, failures)
        batch = StepBatch(ids, obs, reward_column, *flags, no, infos)
        return self._without_failed(batch, failures) if failures else batch

    def _new_obs(self, count: int) -> Tree:
        shape = self._writer.shape
        if shape is None:
            return empty_columns(self.observation_space, (count,))
        return np.empty((count, *shape), self._writer.dtype)

    def _flags(self, ids: np.ndarray, ends: list[tuple[int, Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
        terminated, truncated = np.zeros(len(ids), bool), np.zeros(len(ids), bool)
        for row, term, trunc in ends:
            terminated[row], truncated[row] = bool(term), bool(trunc)
            self._states.code[ids[row]] = ENDED
        return terminated, truncated

    def _find_nonfinite(self, ids: np.ndarray, obs: Tree, failures: dict[int, EnvFailedError]) -> None:
        for row, path, value in nonfinite_rows(obs):
            slot = int(ids[row])
            if slot not in failures:
                failures[slot] = self._not_finite(slot, path, value)

    def _step_number(self, slot: int) -> int:
        return self._rounds - int(self._started_at[slot]) + 1

    def _rewards(self, ids: np.ndarray, rewards: list[Any], failures: dict[int, EnvFailedError]) -> np.ndarray:
        column = np.zeros(len(rewards), np.float32)
        for row, reward in enumerate(rewards):
            slot = int(ids[row])
            try:
                column[row] = coerce_reward(reward, slot, self._step_number(slot) - 1, self._settings.allow_nonfinite)
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
        sent, self._sent = self._sent, None
        parts = [] if sent is None else [self._step(*self._in_order(*sent))]
        slots = np.flatnonzero((self._states.code == NEW) | (self._states.code == RESETTING)).tolist()
        if not parts and not slots:
            raise self._states.nothing_pending()
        due = [s for s in slots if self._not_before[s] <= time.monotonic()]
        if not due and not parts:
            wait_s = min(self._not_before[s] for s in slots) - time.monotonic()
            if timeout_s is not None and timeout_s < wait_s:
                time.sleep(timeout_s)
                return self._reset(self.all_ids[:0])
            time.sleep(max(0.0, wait_s))
            due = [s for s in slots if self._not_before[s] <= time.monotonic()]
        if due:
            self._num_resetting -= len(due)
            parts.append(self._reset(self.all_ids if len(due) == self.num_envs else np.array(due)))
        return parts[0] if len(parts) == 1 else _merge(parts)

    def _reset(self, ids: np.ndarray) -> StepBatch:
        count = len(ids)
        obs = self._new_obs(count)
        infos: dict[int, dict[str, Any]] = {}
        failures: dict[int, EnvFailedError] = {}
        for row, slot in enumerate(ids.tolist()):
            try:
                env = self._envs[slot]
                if env is None:
                    self._envs[slot] = env = self._build(slot)
                    self._steps[slot] = env.step
                ob, info = env.reset(seed=None if self._seeded[slot] else self._first_seed(slot))
                self._writer.write(obs, row, ob, slot, None)
                if info:
                    infos[row] = info
            except Exception as e:
                failures[slot] = self._failure(slot, e, "reset")
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
            raise self._failure(slot, e, "__init__") from e

    def _failure(self, slot: int, error: Exception, where: str) -> EnvFailedError:
        if isinstance(error, EnvFailedError):
            return error
        if where == "step":
            step = self._step_number(slot)
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
        step = self._step_number(slot) - 1
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
        rest = (self._states.code, self._rounds - self._started_at, self._incarnation, self._seeded)
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
        self._steps = [env.step for env in envs]
        self._states.code[:], self._started_at[:] = code, self._rounds - steps
        self._num_resetting = int(np.count_nonzero((code == NEW) | (code == RESETTING)))

    def sub_envs(self) -> list[Any]:
        return list(self._envs)

    def _in_order(self, ids: np.ndarray, actions: list[Any]) -> tuple[np.ndarray, list[Any]]:
        order = np.argsort(ids)
        in_order = [actions[i] for i in order]
        return (self.all_ids if len(ids) == self.num_envs else ids[order]), in_order

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
