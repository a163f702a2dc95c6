"""Write a VectorEnv: one numpy step for all slots at once. Then check it with the public conformance suite."""

import numpy as np
from gymnasium.spaces import Box, Discrete

from rlsample import CommonPolicyEvaluator, PPOPolicy, VectorEnv, as_base_env
from rlsample.testing import check_base_env


class Walk(VectorEnv):
    """Points on a line: step left or right; 1 at the right end is a win, 50 steps are the limit."""

    def __init__(self, num_envs=16):
        self.num_envs = num_envs
        self.observation_space, self.action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
        self.x, self.t = np.zeros(num_envs, np.float32), np.zeros(num_envs, int)
        self.rngs = [np.random.default_rng() for _ in range(num_envs)]

    def vector_reset(self, seeds):
        for slot, seed in enumerate(seeds):
            self.reset_at(slot, seed)
        return self.x[:, None].copy()

    def reset_at(self, slot, seed=None):
        if seed is not None:
            self.rngs[slot] = np.random.default_rng(seed)
        self.x[slot], self.t[slot] = self.rngs[slot].uniform(-0.2, 0.2), 0
        return self.x[slot : slot + 1].copy()

    def vector_step(self, actions):
        self.x = np.clip(self.x + 0.1 * (2 * actions - 1), -1, 1).astype(np.float32)
        self.t += 1
        won = self.x >= 1
        return self.x[:, None].copy(), won.astype(np.float32) - 0.01, won, self.t >= 50, {}


def main():
    print(check_base_env(lambda seed: as_base_env(Walk(3), seed=seed)))
    with CommonPolicyEvaluator(Walk(), PPOPolicy, num_envs=16, rollout_fragment_length=64, seed=0) as evaluator:
        for _ in range(40):
            for minibatch in evaluator.sample().minibatches(256):
                evaluator.compute_apply(minibatch)
        print("mean return", np.mean([e.episode_return for e in evaluator.get_metrics()][-100:]).round(2))


if __name__ == "__main__":
    main()
