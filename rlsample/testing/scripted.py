"""Tiny envs whose every value is known beforehand, for tests of samplers and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from rlsample.env.vector_env import VectorEnv

__all__ = ["CountEnv", "CountVectorEnv"]

_ENDS = ("term", "trunc", "both", "never")


class CountEnv(gymnasium.Env[np.ndarray, int]):
    """Counts its steps: ``reset`` gives obs ``[0.]``, the k-th step gives obs ``[k]`` and the reward ``float(k)``.

    At k = n the episode ends: ``end="term"`` sets terminated, ``"trunc"`` truncated, ``"both"`` both; ``"never"`` none.
    The action (Discrete(2)) changes nothing.

    Attributes:
        resets, steps, closes: how often each was called.
        seeds: the seed of each reset.
        actions: every action, as it came.
    """

    observation_space: gymnasium.Space[Any] = Box(0, 1e6, (1,), np.float32)
    action_space: gymnasium.Space[Any] = Discrete(2)

    def __init__(self, n: int = 3, end: str = "term") -> None:
        if end not in _ENDS:
            raise ValueError(f"end must be one of {', '.join(_ENDS)}, got {end!r}")
        self.n, self.end = n, end
        self.k = 0
        self.resets = self.steps = self.closes = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.k = 0
        self.resets += 1
        self.seeds.append(seed)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.k += 1
        self.steps += 1
        self.actions.append(action)
        ended = self.k == self.n
        terminated, truncated = ended and self.end in ("term", "both"), ended and self.end in ("trunc", "both")
        return self.observe(), self.reward(), terminated, truncated, {}

    def observe(self) -> Any:
        """The observation after k steps; subclasses change its form."""
        return np.array([self.k], np.float32)

    def reward(self) -> Any:
        """The reward of the k-th step; subclasses change its form."""
        return float(self.k)

    def close(self) -> None:
        self.closes += 1


class CountVectorEnv(VectorEnv):
    """A batch of counting envs, one per length, that hands out the same arrays at each call."""

    observation_space = CountEnv.observation_space
    action_space = CountEnv.action_space

    def __init__(self, lengths: Sequence[int] = (3, 3), end: str = "term") -> None:
        self.num_envs = len(lengths)
        self.lengths, self.end = np.array(lengths), end
        self.obs = np.zeros((self.num_envs, 1), np.float32)
        self.rewards = np.zeros(self.num_envs, np.float32)
        self.never = np.zeros(self.num_envs, bool)
        self.ended = np.zeros(self.num_envs, bool)
        self.seeds: list[int | None] = []
        self.steps = self.closes = 0

    def vector_reset(self, seeds: Sequence[int | None]) -> Any:
        self.seeds = list(seeds)
        self.obs[:] = 0
        return self.obs

    def reset_at(self, slot: int, seed: int | None = None) -> Any:
        self.obs[slot] = 0
        return self.obs[slot]

    def vector_step(self, actions: Any) -> Any:
        self.steps += 1
        self.obs += 1
        self.rewards[:] = self.obs[:, 0]
        self.ended[:] = (self.obs[:, 0] == self.lengths) & (self.end != "never")
        terminated = self.ended if self.end in ("term", "both") else self.never
        truncated = self.ended if self.end in ("trunc", "both") else self.never
        return self.obs, self.rewards, terminated, truncated, {}

    def close(self) -> None:
        self.closes += 1
