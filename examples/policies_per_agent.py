"""A policy for each kind of agent: two cats share one that learns, the mouse has its own, which stays as it was made.

    python examples/policies_per_agent.py [--quick]

`policy_mapping_fn` says which agent has which policy, `policies_to_train` which of them learn. The game is a ring of
cells, played by a thread that asks for everybody's action in one call.
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

AGENTS = ["grey cat", "white cat", "mouse"]
RING, STEPS = 16, 30


def kind(agent):
    """The policy of an agent, by name."""
    return "cat" if agent.endswith("cat") else "mouse"


def ways(cells):
    """What each agent sees: the shorter way to each of the others, signed, in halves of the ring."""
    other = {"grey cat": ("mouse", "white cat"), "white cat": ("mouse", "grey cat"), "mouse": ("grey cat", "white cat")}
    half = RING // 2
    return {
        agent: np.array([(cells[o] - cells[agent] + half) % RING - half for o in other[agent]], np.float32) / half
        for agent in AGENTS
    }


class Chase(MultiAgentServingEnv):
    """Each step costs the cats a little and pays the mouse; a cat on the mouse's cell ends the episode."""

    def run(self):
        with contextlib.suppress(ServingError):  # the evaluator is closed
            rng = np.random.default_rng(0)
            while True:
                self.play(dict(zip(AGENTS, rng.permutation(RING).tolist(), strict=False)))

    def play(self, cells):
        self.start_episode()
        for _ in range(STEPS):
            for agent, action in self.get_action(ways(cells)).items():
                cells[agent] = (cells[agent] + int(action) - 1) % RING
            caught = cells["mouse"] in (cells["grey cat"], cells["white cat"])
            reward = 1.0 if caught else -0.05
            self.log_returns({"grey cat": reward, "white cat": reward, "mouse": -reward})
            if caught:
                break
        self.end_episode(ways(cells), truncated=not caught)


def main(iterations):
    chase = Chase(Box(-1, 1, (2,), np.float32), Discrete(3), possible_agents=AGENTS, max_concurrent=2)
    make = functools.partial(PPOPolicy, settings=PPOSettings(learning_rate=3e-3))
    policies = {"cat": make, "mouse": make}
    with CommonPolicyEvaluator(
        chase, policies, policy_mapping_fn=kind, policies_to_train=["cat"], rollout_fragment_length=512, seed=0
    ) as evaluator:
        before = evaluator.get_weights()  # "cat/..." and "mouse/..."
        learning = SyncSamplesSettings(num_sgd_iter=6, minibatch_size=128, standardize_fields=("advantages",))
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator), learning)
        window = MetricsWindow(50)
        for iteration in range(iterations):
            optimizer.step()
            window.add(evaluator.get_metrics())
            if iteration % 3 == 2:
                summary = window.summary()
                each = ", ".join(f"{agent} {summary[f'rollout/agent/{agent}_rew_mean']:5.2f}" for agent in AGENTS)
                print(f"{optimizer.num_steps_sampled:6d} steps: {each}")
        after = evaluator.get_weights()
    changed = {name.partition("/")[0] for name in after if not np.array_equal(before[name], after[name])}
    print("policies that have learnt:", ", ".join(sorted(changed)))


if __name__ == "__main__":
    main(3 if "--quick" in sys.argv else 21)
