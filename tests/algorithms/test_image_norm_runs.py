"""``image_norm_steps``: random play before training gives every evaluator the same pixels, once."""

import gymnasium
import numpy as np
import pytest

from rlsample.algorithms import Trainer, configure
from rlsample.errors import ConfigError

OPTIONS = {"num_envs": 2, "rollout_fragment_length": 4, "image_features": 4, "conv_filters": (2, 8, 8), "seed": 3}


class Glow(gymnasium.Env):
    """One pixel is 0, 30, 60, 90 in turn, another always 200; ten steps an episode."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k = 0
        return self.seen(), {}

    def step(self, action):
        self.k += 1
        return self.seen(), 1.0, False, self.k == 10, {}

    def seen(self):
        image = np.zeros((36, 36), np.uint8)
        image[3, 5], image[7, 9] = 30 * (self.k % 4), 200
        return image


def norm_of(weights):
    return weights["policy_trunk.norms.0.mean"], weights["policy_trunk.norms.0.spread"]


def test_a_run_begins_with_the_pixels_of_random_play(tmp_path):
    options = {"env": Glow, "image_norm_steps": 16, "checkpoint_interval_s": None, **OPTIONS}
    with Trainer(configure(options, out=str(tmp_path / "run"))) as trainer:
        mean, spread = norm_of(trainer.evaluator.policy.get_weights())
        assert (mean[3, 5], mean[7, 9], mean[0, 0]) == (45, 200, 0)  # two slots, eight steps each
        assert spread[3, 5] == pytest.approx(np.std([0, 30, 60, 90]))
        assert spread[7, 9] == spread[0, 0] == 5
        assert trainer.env_steps == 0
        trainer.step()
        trainer.save()
        after = norm_of(trainer.evaluator.policy.get_weights())
    np.testing.assert_array_equal(after, (mean, spread))
    with Trainer.resume(tmp_path / "run", env=Glow) as resumed:
        np.testing.assert_array_equal(norm_of(resumed.evaluator.policy.get_weights()), after)


def test_workers_get_them_with_the_weights():
    options = {"algo": "impala", "env": Glow, "image_norm_steps": 16, "num_workers": 1, "train_batch_size": 8}
    with Trainer(configure(options, **OPTIONS)) as trainer:
        trainer.step()
        weights = trainer.evaluators.foreach_evaluator(_weights)[1]
        np.testing.assert_array_equal(norm_of(weights), norm_of(trainer.evaluator.policy.get_weights()))
        assert norm_of(weights)[0][3, 5] == 45


def _weights(evaluator):
    return evaluator.get_weights()


@pytest.mark.parametrize(
    ("env", "message"), [(Glow(), "give an id or a factory, not <Glow>"), ("CartPole-v1", "needs images")]
)
def test_an_env_that_gives_no_images_of_its_own_is_refused(env, message):
    with pytest.raises(ConfigError, match=message), Trainer(configure(env=env, image_norm_steps=4, num_envs=1)):
        pass
