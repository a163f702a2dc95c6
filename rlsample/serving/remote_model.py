"""A policy in words and weights: what a client needs to act by itself, and the copy it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.spaces import ActionCodec, clip_to_space
from rlsample.errors import ConfigError, ServingError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.sample_batch import ACTION_LOGP
from rlsample.settings import from_options, to_dict
from rlsample.tree import Tree, leaves

__all__ = ["ActingCopy", "describe_model"]

Space = gymnasium.Space[Any]


def describe_model(evaluator: CommonPolicyEvaluator) -> dict[str, Any]:
    """What to build so that the weights of the evaluator's policy fit, and it acts alike: plain values.

    Raises:
        ConfigError: that cannot be had elsewhere: a policy with a model or a way to act of its own, a filter on the
            observations, or actions that are mapped to the bounds.
    """
    from rlsample.policy.dqn import DQNPolicy
    from rlsample.policy.torch_policy import TorchPolicy

    policy, settings = evaluator.policy, evaluator.settings
    kind: Any = type(policy)
    acts_like: Any = DQNPolicy if isinstance(policy, DQNPolicy) else TorchPolicy
    is_known = isinstance(policy, TorchPolicy) and kind.make_model is TorchPolicy.make_model
    if not isinstance(policy, TorchPolicy) or not is_known or kind.act is not acts_like.act:
        raise ConfigError(f"{kind.__name__} acts in its own way, of which a client has no copy: let the server act")
    if settings.observation_filter != "NoFilter" or settings.normalize_actions:
        raise ConfigError("observation_filter and normalize_actions are applied where the server acts: let it act")
    found: dict[str, Any] = {"kind": "actor_critic", "explore": settings.explore, "clip": settings.clip_actions}
    if isinstance(policy, DQNPolicy):
        found.update(kind="dqn", epsilon=policy.epsilon)
    return {**found, "model": to_dict(policy.settings.model)}


class ActingCopy:
    """A policy built from its description, for one thread at a time. Acts by numpy where its layers allow it.

    Args:
        description: of :func:`describe_model`.
        seed: of the exploration.

    Attributes:
        version: the server's, of the weights here; -1: none yet.

    Raises:
        ServingError: the description is of no policy known here.
    """

    def __init__(
        self, description: Mapping[str, Any], observation_space: Space, action_space: Space, seed: int
    ) -> None:
        from rlsample.policy.dqn import DQNPolicy, DQNSettings
        from rlsample.policy.model_settings import ModelSettings
        from rlsample.policy.torch_policy import TorchPolicy
        from rlsample.policy.torch_settings import TorchSettings

        self._action_space, self._codec = action_space, ActionCodec(action_space)
        self.version = -1
        try:
            model = from_options(ModelSettings, description["model"])
            if description["kind"] == "dqn":
                self._policy: TorchPolicy = DQNPolicy(observation_space, action_space, DQNSettings(model=model), seed)
            elif description["kind"] == "actor_critic":
                self._policy = TorchPolicy(observation_space, action_space, TorchSettings(model=model), seed)
            else:
                raise ConfigError(f"a policy of the kind {description['kind']!r}")
            self._explore, self._clips = bool(description["explore"]), bool(description["clip"])
        except (KeyError, TypeError, ValueError) as e:
            raise ServingError(f"the server's policy is unknown to this client; is it of another version? {e}") from e

    def update(self, version: int, weights: Mapping[str, Any], description: Mapping[str, Any]) -> None:
        """Takes over newer weights."""
        from rlsample.policy.dqn import DQNPolicy

        self._policy.set_weights({name: np.asarray(value, np.float32) for name, value in weights.items()})
        if isinstance(self._policy, DQNPolicy):
            self._policy.fix_epsilon(float(description["epsilon"]))
        self.version = version

    def act(self, obs: Tree) -> tuple[Any, Tree, float]:
        """Chooses for one observation, a tree [1, ...].

        Returns:
            The action as ``env.step`` takes it, the same as a column [1, ...], and its log-probability. A Box action is
            clipped to the bounds first, as the server clips it; then the density is the one at the bound.
        """
        out = self._policy.act(obs, self._explore)
        actions, logp = out.actions, float(out.extras[ACTION_LOGP][0])
        if self._clips:
            clipped = clip_to_space(self._action_space, actions)
            if any((a != b).any() for a, b in zip(leaves(clipped), leaves(actions), strict=True)):
                logp = float(self._policy.logp(obs, clipped)[0])
            actions = clipped
        own = self._codec.checked_copy(actions, (0,))
        return self._codec.to_env(own)[0], own, logp
