"""A ServingEnv whose episodes several agents play in.

class Duel(MultiAgentServingEnv):
    def run(self):
        while True:
            obs, _ = duel.reset()                                # a PettingZoo parallel env, say
            self.start_episode()
            while duel.agents:
                actions = self.get_action({agent: obs[agent] for agent in duel.agents})
                obs, rewards, terminated, truncated, infos = duel.step(actions)
                self.log_returns(rewards, infos)
                self.end_agents({agent: obs[agent] for agent in obs if agent not in duel.agents}, truncated=truncated)
            self.end_episode({})                                 # nobody is left

with CommonPolicyEvaluator(Duel(Box(...), Discrete(5), ["red", "blue"]), PPOPolicy) as evaluator:
    batch = evaluator.sample()
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import gymnasium

from rlsample.env.serving.agent_desk import AgentDesk
from rlsample.env.serving.serving_env import ServingEnv
from rlsample.env.serving.serving_settings import ServingSettings
from rlsample.errors import ConfigError, ServingError

__all__ = ["MultiAgentServingEnv"]

ByAgent = Mapping[Hashable, Any]


class MultiAgentServingEnv(ServingEnv):
    """As :class:`ServingEnv`, with dicts by agent: each call is for the agents it names, for all of them or for none.

    All agents share both spaces. One policy acts for all of them, or each has its own:
    ``CommonPolicyEvaluator(env, {"red": PPOPolicy, "blue": PPOPolicy}, policy_mapping_fn=str)``.

    An agent joins an episode by its first get_action or log_action, at any time, and leaves it by :meth:`end_agents` or
    with :meth:`end_episode`; once it left, it cannot come back to that episode. Between two of its actions an agent may
    be silent as long as it likes: its rewards add up.

    Each agent's rows are a sequence of their own, with ``t`` from 0, their final observation and their flags. They all
    carry the episode's ``eps_id``; the column ``agent_id`` is the agent's index in ``possible_agents``, and
    ``env_id`` the episode's place in ``[0, max_concurrent)``. A batch counts agents' rows. ``complete_episodes`` keeps
    an agent's rows together; those of another agent may come in another batch.

    One :class:`~rlsample.evaluation.EpisodeMetrics` tells of an episode that was ended and sampled: its return is the
    sum over the agents, ``agent_returns`` has each one's, its length is the number of get_action and log_action calls
    (env steps, where a call is made for every agent that acts). Callbacks hear of each agent's part by itself.

    Different agents of an episode may be asked for by different threads at a time. An episode is idle when all its
    agents are; it expires as a whole, and a policy that fails closes it as a whole.

    Args:
        observation_space, action_space: of every agent.
        possible_agents: names of all agents there can ever be in an episode, distinct also as text.
        max_concurrent: most episodes open at a time. The env has ``max_concurrent * len(possible_agents)`` slots.
        settings: see :class:`ServingSettings`. The questions of one get_action go in one micro-batch, unless
            ``max_batch`` is smaller or logged rows of an agent are still on their way.

    Raises:
        SpaceError, ConfigError: spaces, agents or numbers that cannot work.
    """

    desk: AgentDesk

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        possible_agents: Sequence[Hashable],
        max_concurrent: int = 100,
        settings: ServingSettings | None = None,
    ) -> None:
        self.possible_agents = tuple(possible_agents)
        names = {str(agent) for agent in self.possible_agents}
        if isinstance(possible_agents, str) or not names or len(names) < len(self.possible_agents):
            raise ConfigError(
                f"possible_agents must be a list of distinct agents, at least one; got {possible_agents!r}"
            )
        super().__init__(observation_space, action_space, max_concurrent, settings)

    def _make_desk(self, max_concurrent: int) -> AgentDesk:
        spaces = self.observation_space, self.action_space
        return AgentDesk(*spaces, self.possible_agents, max_concurrent, self.settings)

    def agents(self, episode_id: str | None = None) -> list[Hashable]:
        """The agents that have acted in the episode and have not left it, in the order they joined.

        Raises:
            ServingError: no such open episode.
        """
        return [part.agent for part in self.desk.registry.find(episode_id).playing()]

    def get_action(
        self, obs: ByAgent, episode_id: str | None = None, timeout_s: float | None = None
    ) -> dict[Hashable, Any]:
        """The policy's actions for these agents' observations, by agent. Waits for all of them; asks nobody else.

        Args:
            obs: agent -> observation. Empty: the answer is, too.
            timeout_s: None: ``settings.timeout_s``.

        Raises:
            SpaceError: an observation does not fit the space (names the agent).
            ServingError: no such open episode; an agent that is unknown, has left or is in use by another thread; not
                all answers in time (the questions stand then: ask again with the same observations, or end the agents,
                each of which then ends, truncated, at that observation); the policy failed (the episode is closed);
                serving is over.
        """
        desk = self.desk
        return desk.ask_all(desk.registry.find(episode_id, obs), obs, timeout_s)

    def log_action(  # type: ignore[override]  # dicts of what the base takes
        self,
        obs: ByAgent,
        action: ByAgent,
        episode_id: str | None = None,
        action_logp: Mapping[Hashable, float | None] | None = None,
    ) -> None:
        """Records actions that were chosen elsewhere, as :meth:`ServingEnv.log_action`.

        Args:
            obs, action: by agent, of the same agents.
            action_logp: by agent; None, or left out of some: unknown.

        Raises:
            SpaceError: a value does not fit its space.
            ServingError: as for :meth:`get_action`; the agents differ; or no room in time.
        """
        self.desk.log_all(self.desk.registry.find(episode_id, obs), obs, action, action_logp)

    def log_returns(  # type: ignore[override]
        self,
        reward: ByAgent,
        info: Mapping[Hashable, dict[str, Any]] | None = None,
        episode_id: str | None = None,
    ) -> None:
        """Adds to the rewards of these agents' last actions. What comes before an agent's first action is not counted.

        Args:
            reward: by agent, each as for :meth:`ServingEnv.log_returns`. Log an agent's last one before it leaves.
            info: by agent, dicts for callbacks; may leave out agents and name others.

        Raises:
            ServingError: a reward is no finite number; an agent waits for an answer; or as for :meth:`get_action`.
        """
        self.desk.add_rewards(self.desk.registry.find(episode_id, reward), reward, info)

    def end_agents(
        self, obs: ByAgent, episode_id: str | None = None, truncated: bool | Mapping[Hashable, bool] = False
    ) -> None:
        """These agents leave; the episode goes on, even with nobody in it. An agent that never acted leaves no rows.

        Args:
            obs: agent -> its final observation. Empty: nobody leaves.
            truncated: of all these agents, or by agent (False where left out; may name others): they were cut off, so
                the value of the final observation counts. False: they terminated.

        Raises:
            SpaceError: an observation does not fit the space.
            ServingError: an agent is unknown, has left before or is in use; no such open episode.
        """
        self.desk.end_some(self.desk.registry.find(episode_id, obs), obs, truncated)

    def end_episode(
        self, obs: ByAgent, episode_id: str | None = None, truncated: bool | Mapping[Hashable, bool] = False
    ) -> None:
        """Ends the episode for all agents that are in it. An episode without any action leaves nothing.

        Args:
            obs: agent -> final observation, of every agent that acted and has not left. Those of agents that never
                acted are checked and leave nothing.
            truncated: as for :meth:`end_agents`.

        Raises:
            SpaceError: an observation does not fit the space; the episode is still open.
            ServingError: an agent's final observation is missing (names it); or as for :meth:`end_agents`.
        """
        self.desk.end_all(self.desk.registry.find(episode_id, obs), obs, truncated)

    def request_action(self, obs: Any, episode_id: str | None, on_answer: Callable[[Any], None]) -> None:
        """Not for several agents.

        Raises:
            ServingError: always.
        """
        raise ServingError("request_action is for episodes of one agent: call get_action in a thread instead")
