"""Subclass PolicyEvaluator alone: no env, no sampler, the same optimizer.

A slot machine with four arms, played in batches; the weights are the arms' preferences (a gradient bandit).
"""

import numpy as np

from rlsample.evaluation import EvaluatorSet, PolicyEvaluator, SampleBatch
from rlsample.optimizers import SyncSamplesOptimizer


class Bandit(PolicyEvaluator):
    def __init__(self, payout=(0.1, 0.5, 0.9, 0.3), seed=0):
        self.payout, self.rng = np.array(payout), np.random.default_rng(seed)
        self.preferences = np.zeros(len(payout))

    def probabilities(self):
        e = np.exp(self.preferences - self.preferences.max())
        return e / e.sum()

    def sample(self):
        arms = self.rng.choice(len(self.payout), size=64, p=self.probabilities())
        return SampleBatch({"actions": arms, "rewards": (self.rng.random(64) < self.payout[arms]).astype(np.float32)})

    def compute_gradients(self, samples):
        chosen = np.eye(len(self.payout))[samples["actions"]]
        advantages = samples["rewards"] - samples["rewards"].mean()
        return -(advantages[:, None] * (chosen - self.probabilities())).mean(0), {"reward": samples["rewards"].mean()}

    def apply_gradients(self, gradients):
        self.preferences -= 2.0 * gradients

    def get_weights(self):
        return self.preferences.copy()

    def set_weights(self, weights):
        self.preferences = weights.copy()


def main():
    bandit = Bandit()
    with SyncSamplesOptimizer(EvaluatorSet(bandit)) as optimizer:
        for step in range(1, 201):
            stats = optimizer.step()
            if step % 50 == 0:
                print(f"{optimizer.num_steps_sampled} pulls, mean reward {stats['reward']:.2f}")
    print("probabilities", bandit.probabilities().round(2))
    assert bandit.probabilities().argmax() == 2


if __name__ == "__main__":
    main()
