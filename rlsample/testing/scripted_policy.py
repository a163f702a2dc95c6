"""A policy whose every answer is written down, for exact tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlsample.policy.policy import ActOutput, Gradients, Policy, Weights
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree, map_tree, num_rows

__all__ = ["ScriptedPolicy"]


class ScriptedPolicy(Policy):
    """Takes the given actions in turn, each call's rows in order; V comes from a table over observations.

    Args:
        actions: per-env actions, used round robin; each as the env takes it.
        values: observation's first number -> V. Missing: 0.

    Attributes:
        seen: every batch of observations that act was given, copied.
    """

    extra_columns: Mapping[str, tuple[tuple[int, ...], Any]] = {
        "action_logp": ((), np.float32),
        "values": ((), np.float32),
    }

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        actions: Sequence[Any] = (0,),
        values: Mapping[float, float] | None = None,
        seed: int | None = 0,
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._actions, self._table = list(actions), dict(values or {})
        self._given = 0
        self.seen: list[Tree] = []

    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        self.seen.append(map_tree(np.copy, obs))
        rows = num_rows(obs)
        chosen = [self._actions[(self._given + k) % len(self._actions)] for k in range(rows)]
        self._given += rows
        logp = np.full(rows, -0.5, np.float32)
        return ActOutput(_stack(self.action_space, chosen), {"action_logp": logp, "values": self.values(obs)})

    def values(self, obs: Tree) -> np.ndarray:
        if not isinstance(obs, np.ndarray) or not self._table:
            return np.zeros(num_rows(obs), np.float32)
        keys = obs.reshape(len(obs), -1)[:, 0].tolist() if len(obs) else []
        return np.array([self._table.get(round(k, 6), 0.0) for k in keys], np.float32)

    def compute_gradients(self, batch: SampleBatch) -> tuple[Gradients, dict[str, float]]:
        return {}, {}

    def apply_gradients(self, gradients: Gradients) -> None:
        self.version += 1

    def get_weights(self) -> Weights:
        return {}

    def set_weights(self, weights: Weights) -> None:
        self.version += 1

    def get_state(self) -> dict[str, Any]:
        return {"given": self._given, "version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._given, self.version = int(state["given"]), int(state["version"])


def _stack(space: gymnasium.Space[Any], actions: list[Any]) -> Tree:
    if isinstance(space, gymnasium.spaces.Dict):
        return {k: _stack(s, [a[k] for a in actions]) for k, s in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_stack(s, [a[i] for a in actions]) for i, s in enumerate(space.spaces))
    return np.array(actions, space.dtype)
