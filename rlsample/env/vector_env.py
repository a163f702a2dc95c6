"""What a user implements for a batch of envs that step together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from rlsample.tree import Tree

__all__ = ["VectorEnv"]


class VectorEnv(ABC):
    """B envs in lock-step: each call steps all of them. ``as_base_env(my_vector_env)`` makes it a BaseEnv.

        class Countdowns(VectorEnv):
            num_envs = 2
            observation_space = Box(0, 9, (1,))
            action_space = Discrete(2)

            def vector_reset(self, seeds):
                self.left = np.full(2, 9.0, np.float32)
                return self.left[:, None]

            def reset_at(self, slot, seed=None):
                self.left[slot] = 9
                return self.left[slot, None]

            def vector_step(self, actions):
                self.left -= 1
                never = np.zeros(2, bool)
                return self.left[:, None], np.ones(2), self.left == 0, never, {}

    Arrays may be reused from call to call: they are copied. No slot resets by itself: one that ended stays ended until
    ``reset_at``, and is not stepped meanwhile.

    Attributes:
        num_envs: B.
        observation_space: the space of one env.
        action_space: the space of one env.
    """

    num_envs: int
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    @abstractmethod
    def vector_reset(self, seeds: Sequence[int | None]) -> Tree:
        """Starts an episode in each env; called first, and again after a call that Ctrl-C broke off.

        Args:
            seeds: B seeds, one per slot; None, as when it is called again: the env picks its own.

        Returns:
            The first observations: tree [B, ...].
        """

    @abstractmethod
    def reset_at(self, slot: int, seed: int | None = None) -> Any:
        """Starts a new episode in one env, which ended or is in mid-episode, and returns its first observation."""

    @abstractmethod
    def vector_step(self, actions: Tree) -> tuple[Tree, Any, Any, Any, Mapping[int, dict[str, Any]]]:
        """Steps every env.

        Args:
            actions: tree [B, ...] of the action space; yours to keep.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``: observations, tree [B, ...], of an env that ends its
            episode the last one; rewards, float[B]; two bool[B]; and infos by slot, for those that have one.
        """

    def close(self) -> None:  # noqa: B027  (optional)
        """Frees what the envs hold. Called once."""
