"""A vector env of ale-py that a user made, behind the polled interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from rlsample.env.atari_seeds import SEED_MASK
from rlsample.env.env_settings import EnvSettings
from rlsample.env.gymnasium_vector import GymnasiumVectorAdapter, infos_by_slot
from rlsample.errors import ConfigError
from rlsample.tree import Tree

__all__ = ["AleVectorAdapter", "is_ale_vector"]


def is_ale_vector(env: GymnasiumVectorEnv[Any, Any, Any]) -> bool:
    """Whether this is ale-py's AtariVectorEnv, bare or in wrappers; ale_py is not imported."""
    return any(cls.__module__.startswith("ale_py.") for cls in type(env.unwrapped).__mro__)


class AleVectorAdapter(GymnasiumVectorAdapter):
    """``ale_py.vector_env.AtariVectorEnv`` as the user made it: its options, and its clipped rewards if so set.

    :func:`~rlsample.env.atari.make_atari` is the better way: raw returns, lost lives, EnvPool's options, two groups.

    Its autoreset mode is read from the object: its metadata may be another one's by now, since ale-py writes the mode
    into a dict that all vector envs share. Each slot has its own seed.

    Args:
        env: stepped and closed by this adapter from now on.
        settings, seed, worker_index: as in :class:`~rlsample.env.gymnasium_vector.GymnasiumVectorAdapter`.

    Raises:
        ConfigError: ``batch_size`` below ``num_envs``.
    """

    def __init__(
        self,
        env: GymnasiumVectorEnv[Any, Any, Any],
        *,
        settings: EnvSettings | None = None,
        seed: int | None = None,
        worker_index: int = 0,
    ) -> None:
        inner: Any = env.unwrapped
        if inner.batch_size != env.num_envs:
            raise ConfigError(
                f"AtariVectorEnv with batch_size={inner.batch_size} below num_envs={env.num_envs} takes no actions by "
                f"slot; use make_atari(..., num_envs={env.num_envs}, batch_size={inner.batch_size})"
            )
        super().__init__(env, settings=settings, seed=seed, worker_index=worker_index)
        self.mode = AutoresetMode(inner.autoreset_mode)
        self.copies_obs = env is not inner
        self._frames = np.zeros(self.num_envs, np.int64)
        self._over = np.zeros(self.num_envs, bool)  # games that are to begin anew in the next row

    def _vector_reset(self) -> tuple[Tree, Mapping[int, dict[str, Any]]]:
        seeds = None if self._seeds[0] is None else np.array([s & SEED_MASK for s in self._seeds if s is not None])
        obs, infos = self.env.reset(seed=seeds)
        self._frames, self._over = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        return obs, infos_by_slot(infos, self.num_envs)

    def _vector_step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, Any]:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        frames, over = infos["episode_frame_number"], terminated & ~truncated
        began = over if self.mode is AutoresetMode.SAME_STEP else self._over
        if (began & (frames > self._frames)).any():
            raise ConfigError(
                "AtariVectorEnv with life_loss_info=True says that an episode ended, but goes on with it; use "
                "make_atari, whose infos tell lost lives (episodic_life=True ends episodes with them)"
            )
        self._frames, self._over = frames, over
        return obs, rewards, terminated, truncated, infos

    def _require_mask(self, ids: np.ndarray, ended: np.ndarray) -> None:
        """It resets any slots by mask."""
