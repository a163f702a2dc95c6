"""A user's VectorEnv behind the polled interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsample.env.base_env import StepBatch
from rlsample.env.env_settings import EnvSettings
from rlsample.env.lockstep import LockstepEnv
from rlsample.env.slot_states import FAILED
from rlsample.env.spaces import zeros_columns
from rlsample.env.vector_env import VectorEnv
from rlsample.errors import EnvFailedError
from rlsample.tree import Tree, gather

__all__ = ["VectorEnvAdapter"]


class VectorEnvAdapter(LockstepEnv):
    """Steps a :class:`~rlsample.env.vector_env.VectorEnv` inside poll; resets are immediate.

    What the env returns is checked (shapes, dtypes, NaN, rewards) and copied.
    """

    def __init__(
        self,
        env: VectorEnv,
        *,
        settings: EnvSettings | None = None,
        seed: int | None = None,
        worker_index: int = 0,
    ) -> None:
        self.env = env
        super().__init__(
            env.num_envs,
            env.observation_space,
            env.action_space,
            settings=settings or EnvSettings(),
            seed=seed,
            worker_index=worker_index,
        )

    def _vector_reset(self) -> tuple[Tree, Mapping[int, dict[str, Any]]]:
        return self.env.vector_reset(list(self._seeds)), {}

    def _vector_step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, Any]:
        return self.env.vector_step(actions)

    def _read_infos(self, infos: Any, obs: Tree, ended: np.ndarray) -> dict[int, dict[str, Any]]:
        return {slot: info for slot, info in infos.items() if info}

    def _reset_slots(self, ids: np.ndarray) -> StepBatch:
        obs = zeros_columns(self.observation_space, (len(ids),))
        failures: dict[int, BaseException] = {}
        for row, slot in enumerate(ids.tolist()):
            try:
                self._writer.write(obs, row, self.env.reset_at(slot), slot, None)
            except EnvFailedError as e:
                failures[slot] = self._failures[slot] = e
            except Exception as e:
                failure = EnvFailedError(f"slot {slot}: reset_at raised {type(e).__name__}: {e}", slot=slot)
                failure.__cause__ = e
                failures[slot] = self._failures[slot] = failure
        good = [row for row, slot in enumerate(ids.tolist()) if slot not in failures]
        if failures:
            self._states.code[list(failures)] = FAILED
            obs = gather(obs, good)
        batch = self._first_rows(ids[good], obs, {})
        return batch._replace(failures={**failures, **batch.failures})

    def _close_env(self) -> None:
        self.env.close()

    def sub_envs(self) -> list[Any]:
        return []
