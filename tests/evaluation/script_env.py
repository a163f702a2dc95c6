"""An env that follows a script, so that a test knows each of its rows."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class ScriptEnv(gymnasium.Env):
    """Plays episodes of given lengths and ends, then the same again; obs = 1000 * episode + step + slot / 4.

    ``fails_at``: the step, counted over all episodes, whose observation is NaN.
    """

    observation_space, action_space = spaces.Box(-1e6, 1e6, (1,), np.float32), spaces.Discrete(3)

    def __init__(self, slot: int, episodes: list[tuple[int, str]], fails_at: int | None = None):
        self.slot, self.episodes, self.episode, self.k = slot, episodes, -1, 0
        self.steps, self.fails_at = 0, fails_at

    def obs(self):
        value = np.nan if self.steps == self.fails_at else 1000 * self.episode + self.k + self.slot / 4
        return np.array([value], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.k = 0
        return self.obs(), {}

    def step(self, action):
        self.k += 1
        self.steps += 1
        length, end = self.episodes[self.episode % len(self.episodes)]
        over = self.k == length
        reward = float(10 * self.k + self.slot + int(action) / 8)
        return self.obs(), reward, over and end in ("term", "both"), over and end in ("trunc", "both"), {}
