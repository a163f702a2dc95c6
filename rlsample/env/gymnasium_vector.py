"""``gymnasium.vector.VectorEnv`` behind the polled interface, in each of its autoreset modes.

What a mode does, and what becomes of it:

* NEXT_STEP: the observation that comes with the end is the true final one; the next step resets the slot and ignores
  its action. ``try_reset`` returns None, and that step's row is the first of the new episode, not a transition.
* SAME_STEP: the step that ends an episode returns the next one's first observation; the true final one is in the
  infos. Both are put where they belong; ``try_reset`` hands out the first observation at once.
* DISABLED: nothing resets by itself; ``try_reset`` resets through ``options={"reset_mask": ...}`` at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from rlsample.env.base_env import StepBatch
from rlsample.env.env_settings import EnvSettings
from rlsample.env.lockstep import LockstepEnv
from rlsample.env.quick_contains import quicken
from rlsample.env.slot_states import ENDED, RESETTING
from rlsample.env.spaces import zeros_columns
from rlsample.errors import ConfigError, EnvProtocolError, SpaceError
from rlsample.tree import Tree, assign, gather

__all__ = ["GymnasiumVectorAdapter", "infos_by_slot"]

_log = logging.getLogger("rlsample")
_CLOSE_WAIT_S = 1.0
_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


class GymnasiumVectorAdapter(LockstepEnv):
    """Steps a gymnasium vector env inside poll.

    Args:
        env: stepped and closed by this adapter from now on.
        settings: ``allow_nonfinite`` is obeyed here.
        seed: SyncVectorEnv and AsyncVectorEnv get one seed per slot; others, which take a single int, slot 0's.
        worker_index: the evaluator's index, for the seeds.

    Raises:
        ConfigError: an unknown autoreset mode.
        SpaceError: a space of no fixed size.
    """

    def __init__(
        self,
        env: GymnasiumVectorEnv[Any, Any, Any],
        *,
        settings: EnvSettings | None = None,
        seed: int | None = None,
        worker_index: int = 0,
    ) -> None:
        self.env = env
        self.mode = _autoreset_mode(env)
        quicken(env)
        self.resets_by_stepping = self.mode is AutoresetMode.NEXT_STEP
        self._generic = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self.copies_obs = not (type(env) in (SyncVectorEnv, AsyncVectorEnv) and env.copy)  # type: ignore[attr-defined]
        super().__init__(
            env.num_envs,
            env.single_observation_space,
            env.single_action_space,
            settings=settings or EnvSettings(),
            seed=seed,
            worker_index=worker_index,
        )
        self._first_obs = zeros_columns(self.observation_space, (self.num_envs,))  # SAME_STEP: of slots that ended
        self._first_infos: dict[int, dict[str, Any]] = {}

    _saved = (*LockstepEnv._saved, "_first_obs", "_first_infos")

    def _vector_reset(self) -> tuple[Tree, Mapping[int, dict[str, Any]]]:
        seed: Any = list(self._seeds) if self._generic else self._seeds[0]
        obs, infos = self.env.reset(seed=seed)
        return obs, infos_by_slot(infos, self.num_envs)

    def _vector_step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, Any]:
        return self.env.step(actions)

    def _read_infos(self, infos: Any, obs: Tree, ended: np.ndarray) -> dict[int, dict[str, Any]]:
        if self.mode is not AutoresetMode.SAME_STEP or 1 not in ended.tobytes():
            return infos_by_slot(infos, self.num_envs) if infos else {}
        rows = infos_by_slot({k: v for k, v in infos.items() if k not in _FINAL}, self.num_envs)
        final_rows = infos_by_slot(infos.get("final_info") or {}, self.num_envs)
        slots = np.flatnonzero(ended)
        assign(self._first_obs, slots, gather(obs, slots))
        self._place_finals(obs, slots, infos.get("final_obs"))
        for slot in slots.tolist():
            first = rows.pop(slot, {})
            last = final_rows.get(slot, {})
            if "episode" in first:  # RecordEpisodeStatistics speaks of the episode that ended
                last["episode"] = first.pop("episode")
            self._first_infos[slot] = first
            if last:
                rows[slot] = last
        return rows

    def _place_finals(self, obs: Tree, slots: np.ndarray, finals: Any) -> None:
        """Puts the true final observations of ``slots`` into ``obs``."""
        if finals is None:
            raise SpaceError('an episode ended, but the infos hold no "final_obs" as the mode SAME_STEP promises')
        if isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object):
            for slot in slots.tolist():
                self._writer.write(obs, slot, finals[slot], slot, self._episode_step(slot) + 1)
        else:
            batch = self._writer.copy_batch(finals, self.num_envs, copy=False)
            assign(obs, slots, gather(batch, slots))

    def _reset_slots(self, ids: np.ndarray) -> StepBatch | None:
        code = self._states.code
        codes = code[ids]
        all_ended = codes.tobytes().count(ENDED) == len(ids)
        if all_ended and self.mode is AutoresetMode.NEXT_STEP:
            code[ids] = RESETTING
            return None
        if self.mode is AutoresetMode.DISABLED:
            return self._first_rows(ids, *self._reset_masked(ids, ids))
        if not all_ended:
            ended = codes == ENDED
            self._require_mask(ids, ended)
            # In SAME_STEP the ended ones are in their new episode already, and keep what they observe there.
            reset = ids if self.mode is AutoresetMode.NEXT_STEP else ids[~ended]
            obs, infos = self._reset_masked(reset, ids)
            return self._first_rows(ids, obs, {**self._pop_first_infos(ids[ended]), **infos})
        return self._first_rows(ids, gather(self._first_obs, ids), self._pop_first_infos(ids))

    def _pop_first_infos(self, ids: np.ndarray) -> dict[int, dict[str, Any]]:
        """SAME_STEP: the infos of first observations, which came with the end of the last episode."""
        return {slot: self._first_infos.pop(slot, {}) for slot in ids.tolist()}

    def _reset_masked(self, reset: np.ndarray, ids: np.ndarray) -> tuple[Tree, dict[int, dict[str, Any]]]:
        """Resets the slots ``reset``; returns the env's current observations of ``ids`` [K, ...] and the infos."""
        mask = np.zeros(self.num_envs, bool)
        mask[reset] = True
        obs, infos = self.env.reset(options={"reset_mask": mask})
        return gather(self._writer.copy_batch(obs, self.num_envs, copy=False), ids), infos_by_slot(infos, self.num_envs)

    def _require_mask(self, ids: np.ndarray, ended: np.ndarray) -> None:
        slots = ids[~ended].tolist()
        if not self._generic:
            raise EnvProtocolError(
                f"slots {slots} are in mid-episode, and {self.env} resets a slot at its episode's end only; build the "
                "envs one by one (vectorize='loop'), leave out the horizon, or use AutoresetMode.DISABLED"
            )
        no_flag = isinstance(self.env.unwrapped, AsyncVectorEnv) and not self.env.unwrapped.shared_memory
        if no_flag and ended.any() and self.mode is AutoresetMode.NEXT_STEP:
            # Its workers keep the pending auto-reset over a reset by mask, and would ignore the next action.
            raise EnvProtocolError(
                f"slots {ids[ended].tolist()} ended and {slots} are in mid-episode: AsyncVectorEnv with "
                "shared_memory=False cannot reset both in one call; ask for them one after the other"
            )

    def _close_env(self) -> None:
        inner = self.env.unwrapped
        if isinstance(inner, AsyncVectorEnv) and not inner.closed:
            _close_async(inner)
        self.env.close()

    def _interrupt(self) -> None:
        for process in getattr(self.env.unwrapped, "processes", ()):
            with contextlib.suppress(Exception):
                process.terminate()

    def sub_envs(self) -> list[Any]:
        return list(getattr(self.env.unwrapped, "envs", ()))


def _close_async(env: AsyncVectorEnv) -> None:
    """Gymnasium's own close waits for ever for a worker that is gone, or for a step that another thread began."""
    idle = env._state.value == "default"
    deadline = time.monotonic() + _CLOSE_WAIT_S
    for pipe in env.parent_pipes:
        if idle and pipe is not None:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
    for pipe, process in zip(env.parent_pipes, env.processes, strict=True):
        if idle:
            process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join(_CLOSE_WAIT_S)
        if pipe is not None:
            pipe.close()
        with contextlib.suppress(ValueError):  # still alive, which nothing more can be done about
            process.close()
    for end in (env.error_queue._reader, env.error_queue._writer):  # type: ignore[attr-defined]
        end.close()  # Queue.close leaves both to the garbage collector if nothing was ever put
    env.closed = True


def _autoreset_mode(env: GymnasiumVectorEnv[Any, Any, Any]) -> AutoresetMode:
    told = env.metadata.get("autoreset_mode")
    if told is None:
        _log.warning("%s does not say its autoreset mode (metadata['autoreset_mode']); NEXT_STEP is assumed", env)
        return AutoresetMode.NEXT_STEP
    try:
        return told if isinstance(told, AutoresetMode) else AutoresetMode(told)
    except ValueError as e:
        names = ", ".join(m.value for m in AutoresetMode)
        raise ConfigError(f"{env} has the autoreset mode {told!r}; known: {names}") from e


def infos_by_slot(infos: Mapping[str, Any], num_envs: int) -> dict[int, dict[str, Any]]:
    """Gymnasium's dict of arrays as one dict per slot that has something.

    ``{"a": [3, 0], "_a": [True, False]}`` becomes ``{0: {"a": 3}}``. Entries of 1-D arrays become Python values, of
    others copies. Without a mask every slot has the key: its entry, or the value itself if it is no array [num_envs].
    """
    rows: dict[int, dict[str, Any]] = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        slots = range(num_envs) if mask is None else np.flatnonzero(mask).tolist()
        entries: Any
        if isinstance(value, Mapping):
            nested = infos_by_slot(value, num_envs)
            entries = [nested.get(slot, {}) for slot in range(num_envs)]
            if mask is None:
                slots = sorted(nested)
        elif isinstance(value, np.ndarray) and value.ndim == 1 and len(value) == num_envs:
            entries = value.tolist()
        elif isinstance(value, (np.ndarray, list, tuple)) and np.ndim(value) and len(value) == num_envs:
            entries = [v.copy() if isinstance(v, np.ndarray) else v for v in value]
        else:
            entries = [value] * num_envs
        for slot in slots:
            rows.setdefault(slot, {})[key] = entries[slot]
    return rows
