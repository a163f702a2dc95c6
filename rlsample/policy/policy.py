"""What the sampler and the optimizers need of a policy. Knows no env and no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from rlsample.errors import ConfigError
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree

__all__ = ["ActOutput", "Gradients", "Policy", "Weights"]

Weights = dict[str, np.ndarray]
Gradients = dict[str, np.ndarray]


class ActOutput(NamedTuple):
    """Answers for K observations.

    Attributes:
        actions: tree [K, ...] of the action space, in its dtype; may lie outside a Box's bounds (the sampler
            clips what it sends, the batch keeps this).
        extras: columns to keep with the rows, each [K, ...]: the names and dtypes of :attr:`Policy.extra_columns`.

    The arrays may be reused by the next call: keep a copy, not a reference.
    """

    actions: Tree
    extras: Mapping[str, np.ndarray]


class Policy(ABC):
    """Acts on batches of observations and learns from batches of rows.

    Attributes:
        observation_space, action_space: of one env.
        version: counts weight changes: +1 for each apply_gradients, learn or set_weights.
        extra_columns: name -> (shape of one row, dtype) of what :meth:`act` returns beside the actions, such as
            ``{"action_logp": ((), np.float32), "values": ((), np.float32)}``.
        acts_while_learning: one thread may :meth:`act` while another learns, sets or reads weights or asks for values.
            False: whoever uses the policy from several threads has to let acting wait until an update is over.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    version: int = 0
    acts_while_learning: bool = False
    extra_columns: Mapping[str, tuple[tuple[int, ...], Any]] = {}

    @abstractmethod
    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        """Chooses actions for K observations (tree [K, ...], filtered).

        Draws from the policy's own generator, in row order. ``explore=False``: the mode of the distribution, no draw.
        """

    def act_for(self, agents: np.ndarray, obs: Tree, explore: bool = True) -> ActOutput:
        """As :meth:`act`, where it may matter whose observations these are. Default: it does not.

        Args:
            agents: int64[K], each observation's agent, by its index among the env's possible ones.
        """
        return self.act(obs, explore)

    def values(self, obs: Tree) -> np.ndarray:
        """V of K observations: float32[K], a fresh array. Zeros for a policy without a critic."""
        from rlsample.tree import num_rows

        return np.zeros(num_rows(obs), np.float32)

    def logp(self, obs: Tree, actions: Tree) -> np.ndarray:
        """Log-probability that :meth:`act`, exploring with the weights of now, chooses these actions: float32[K].

        Raises:
            ConfigError: this policy cannot tell (the default).
        """
        raise ConfigError(f"{type(self).__name__} does not tell the probabilities of given actions: it has no logp()")

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds learning columns (advantages, targets) to a batch fresh from the sampler. Default: nothing."""
        return batch

    @abstractmethod
    def compute_gradients(self, batch: SampleBatch) -> tuple[Gradients, dict[str, float]]:
        """Gradients of the loss (copies, by parameter name) and statistics; the weights stay as they are."""

    @abstractmethod
    def apply_gradients(self, gradients: Gradients) -> None:
        """One optimizer step."""

    def learn(self, batch: SampleBatch) -> dict[str, float]:
        """compute_gradients and apply_gradients in one go; subclasses do it without copies. Same update."""
        gradients, stats = self.compute_gradients(batch)
        self.apply_gradients(gradients)
        return stats

    @abstractmethod
    def get_weights(self) -> Weights:
        """Copies of all parameters, by name."""

    @abstractmethod
    def set_weights(self, weights: Weights) -> None:
        """Copies the values in; later changes to the arrays change nothing here."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Weights, optimizer state, generator state, version: copies; arrays, numbers, strings and dicts of them."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues bit for bit from :meth:`get_state`."""

    def set_progress(self, env_steps: int) -> None:
        """Tells how many env steps were sampled so far, for schedules. Default: nothing."""
        return
