"""Hooks into sampling and training. What a subclass does not override is never called and costs nothing.

class PoleAngle(Callbacks):
    def on_episode_step(self, episode):
        worst = episode.user_data.get("worst", 0.0)
        episode.user_data["worst"] = max(worst, abs(episode.last_obs[2]))

    def on_episode_end(self, episode):
        episode.custom_metrics["worst_angle"] = episode.user_data["worst"]    # rollout/custom/worst_angle_mean
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlsample.errors import unknown_name
from rlsample.tree import Tree

if TYPE_CHECKING:
    from rlsample.evaluation.policy_evaluator import PolicyEvaluator
    from rlsample.sample_batch import SampleBatch

__all__ = ["Callbacks", "Episode"]


@dataclass(slots=True, eq=False)
class Episode:
    """A running episode, as callbacks see it. The ``last_*`` fields are kept only for ``on_episode_step``.

    Attributes:
        env_id: slot; of several agents, the episode's place.
        eps_id: the id its rows carry in the batches.
        length: steps so far.
        episode_return: sum of the env's own rewards so far, before any clipping.
        last_obs: tree without a leading axis, as the env gave it (not filtered); read it, don't write. None before the
            first step.
        last_action: tree without a leading axis, as the policy chose it; None before the first step.
        last_reward: the env's own; 0 before the first step.
        last_info: what the env returned beside the last observation, often empty.
        user_data: yours; dropped with the episode.
        agent: whose part of the episode it is, where several agents play: each has its own. Else None.
        custom_metrics: yours: numbers that are averaged over the window of episodes and logged by name.
    """

    env_id: int
    eps_id: int
    length: int = 0
    episode_return: float = 0.0
    last_obs: Tree = None
    last_action: Tree = None
    last_reward: float = 0.0
    last_info: dict[str, Any] = field(default_factory=dict)
    user_data: dict[str, Any] = field(default_factory=dict)
    custom_metrics: dict[str, float] = field(default_factory=dict)
    agent: Hashable | None = None


class Callbacks:
    """Override what you need. An exception in a callback ends ``sample()`` or the training with it.

    A method of a subclass that starts with ``on_`` and is no callback is an error at once (the nearest name is given):
    it would never be called.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("on_") and name not in _names():
                raise unknown_name("callback", name, _names())

    def on_episode_start(self, episode: Episode) -> None:
        """An episode began; no step was taken yet."""

    def on_episode_step(self, episode: Episode) -> None:
        """A step was taken; ``length``, ``episode_return`` and ``last_*`` include it. A Python call per env step."""

    def on_episode_end(self, episode: Episode) -> None:
        """The episode terminated or was truncated. ``custom_metrics`` set here are still logged."""

    def on_sample_end(self, evaluator: PolicyEvaluator, batch: SampleBatch) -> None:
        """A batch is complete and about to be returned by ``sample()``; columns may be added or replaced."""

    def on_train_result(self, trainer: Any, result: dict[str, Any]) -> None:
        """A training iteration is over; what is put into ``result`` is logged with it."""

    def uses(self, name: str) -> bool:
        """Whether a callback is overridden, in a subclass or on this object.

        Raises:
            ConfigError: no callback has that name.
        """
        if name not in _names():
            raise unknown_name("callback", name, _names())
        return getattr(getattr(self, name), "__func__", None) is not getattr(Callbacks, name)


def _names() -> set[str]:
    return {name for name in vars(Callbacks) if name.startswith("on_")}
