"""Several agents in a served episode: they come late, leave early, and one policy learns from all of them.

    python examples/multi_agent_serving.py [--quick]

Three couriers walk along a street, each to a door of its own. Who arrives leaves the game; green sets out later than
the others. The game is played by a thread that nobody steps: it calls for the actions of those who are in it.
"""

import contextlib
import functools
import sys

import numpy as np
from gymnasium.spaces import Box, Discrete

from rlsample.env import MultiAgentServingEnv
from rlsample.errors import ServingError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet, MetricsWindow
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.policy import PPOPolicy, PPOSettings

SETS_OUT = {"red": 0, "blue": 0, "green": 3}  # the step from which each one walks
STREET, STEPS = 10, 20


class Street:
    """Positions and doors on a street of 10 houses; an observation is how far, and on which side, the door is."""

    def __init__(self, rng):
        self.position = {agent: int(rng.integers(STREET)) for agent in SETS_OUT}
        self.door = {agent: int(rng.integers(STREET)) for agent in SETS_OUT}
        self.arrived = set()

    def out_at(self, step):
        return [agent for agent in SETS_OUT if SETS_OUT[agent] <= step and agent not in self.arrived]

    def look(self, agents):
        return {a: np.array([self.door[a] - self.position[a]], np.float32) / STREET for a in agents}

    def walk(self, actions):
        """Moves left, not at all or right; returns the rewards: each step costs, the door pays."""
        rewards = {}
        for agent, action in actions.items():
            self.position[agent] = int(np.clip(self.position[agent] + action - 1, 0, STREET - 1))
            at_door = self.position[agent] == self.door[agent]
            rewards[agent] = 1.0 if at_door else -0.1
            if at_door:
                self.arrived.add(agent)
        return rewards


class Couriers(MultiAgentServingEnv):
    def run(self):
        with contextlib.suppress(ServingError):  # the evaluator is closed
            rng = np.random.default_rng(0)
            while True:
                self.play(Street(rng))

    def play(self, street):
        self.start_episode()
        for step in range(STEPS):
            out = street.out_at(step)
            actions = self.get_action(street.look(out))  # nobody else is asked
            self.log_returns(street.walk(actions))
            self.end_agents(street.look(a for a in out if a in street.arrived))
        self.end_episode(street.look(street.out_at(STEPS)), truncated=True)


def main(iterations):
    couriers = Couriers(Box(-1, 1, (1,), np.float32), Discrete(3), possible_agents=list(SETS_OUT), max_concurrent=2)
    policy = functools.partial(PPOPolicy, settings=PPOSettings(learning_rate=3e-3))
    with CommonPolicyEvaluator(couriers, policy, rollout_fragment_length=512, seed=0) as evaluator:
        learning = SyncSamplesSettings(num_sgd_iter=6, minibatch_size=128, standardize_fields=("advantages",))
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator), learning)
        window = MetricsWindow(50)
        for iteration in range(iterations):
            optimizer.step()
            window.add(evaluator.get_metrics())
            if iteration % 3 == 2:
                summary = window.summary()
                each = ", ".join(f"{agent} {summary[f'rollout/agent/{agent}_rew_mean']:5.2f}" for agent in SETS_OUT)
                print(f"{optimizer.num_steps_sampled:6d} steps, return {summary['rollout/ep_rew_mean']:5.2f}: {each}")
    print("closed, and the game's thread has ended:", not couriers.is_alive())


if __name__ == "__main__":
    main(3 if "--quick" in sys.argv else 15)
