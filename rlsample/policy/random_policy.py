"""A policy that ignores observations and never learns. Numpy only: for benchmarks, tests and baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from rlsample.policy.distributions import make_distribution
from rlsample.policy.noise import NoiseStream
from rlsample.policy.obs_encoding import ObsEncoder
from rlsample.policy.policy import ActOutput, Gradients, Policy, Weights
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree, num_rows

__all__ = ["RandomPolicy"]


class RandomPolicy(Policy):
    """Draws from the distribution of the action space with all inputs zero.

    That is uniform over Discrete, MultiDiscrete and MultiBinary (over what an ``action_mask`` allows), and standard
    normal for Box. ``extra_columns``: action_logp; values are zero.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: None = None,
        seed: int = 0,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.extra_columns = {"action_logp": ((), np.float32), "values": ((), np.float32)}
        self.version = 0
        self._distribution = make_distribution(action_space)
        self._encoder = ObsEncoder(observation_space)
        self._noise = NoiseStream(self._distribution.noise_kinds, np.random.SeedSequence(seed))

    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        num = num_rows(obs)
        actions, logp = self._distribution.act(self._inputs(obs), self._noise.take(num) if explore else None)
        return ActOutput(actions, {"action_logp": logp, "values": np.zeros(num, np.float32)})

    def logp(self, obs: Tree, actions: Tree) -> np.ndarray:
        return self._distribution.logp(self._inputs(obs), actions)

    def _inputs(self, obs: Tree) -> np.ndarray:
        inputs = np.zeros((num_rows(obs), self._distribution.num_inputs), np.float32)
        return self._distribution.apply_mask(inputs, self._encoder.mask(obs)) if self._encoder.has_mask else inputs

    def compute_gradients(self, batch: SampleBatch) -> tuple[Gradients, dict[str, float]]:
        """No gradients, no statistics."""
        return {}, {}

    def apply_gradients(self, gradients: Gradients) -> None:
        """Counts the version up."""
        self.version += 1

    def get_weights(self) -> Weights:
        """No weights."""
        return {}

    def set_weights(self, weights: Weights) -> None:
        """Counts the version up."""
        self.version += 1

    def get_state(self) -> dict[str, Any]:
        return {"noise": self._noise.get_state(), "version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._noise.set_state(state["noise"])
        self.version = int(state["version"])
