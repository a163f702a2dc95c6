"""Seeds of Atari games."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsample.env.base_env import slot_seed
from rlsample.errors import ConfigError

__all__ = ["SEED_MASK", "game_seeds", "next_seeds"]

SEED_MASK = 0x7FFFFFFF  # ale-py takes the seed as a C int, and a negative one for none


def game_seeds(seed: int | Sequence[int] | None, num_envs: int, worker_index: int) -> np.ndarray | None:
    """int64[num_envs]: the first seed of each slot's games; see :func:`~rlsample.env.atari.make_atari`.

    Raises:
        ConfigError: a number of seeds that is not that of the slots.
    """
    if seed is None:
        return None
    if hasattr(seed, "__index__"):
        return np.array([slot_seed(seed, worker_index, slot) & SEED_MASK for slot in range(num_envs)])  # type: ignore
    if len(seed) != num_envs:
        raise ConfigError(f"seed has {len(seed)} entries for {num_envs} envs; give one int, or one per env")
    return np.array([int(s) & SEED_MASK for s in seed])


def next_seeds(seeds: np.ndarray) -> np.ndarray:
    """int64[N]: others, that depend on these alone."""
    return np.array([int(np.random.SeedSequence(int(seed)).generate_state(1)[0]) & SEED_MASK for seed in seeds])
