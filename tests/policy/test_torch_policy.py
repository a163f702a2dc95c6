import logging

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from rlsample.errors import ConfigError, SpaceError
from rlsample.policy import A2CPolicy, ModelSettings, PPOPolicy, PPOSettings, TorchPolicy
from rlsample.policy.model_passes import TorchPass
from rlsample.policy.models import ActorCritic
from rlsample.sample_batch import SampleBatch
from rlsample.tree import num_rows

OBS = Box(-5, 5, (4,), np.float32)
TWO = Discrete(2)
MIXED = Dict({"move": Discrete(3, start=2), "aim": Box(-1, 1, (2,), np.float32), "keys": MultiBinary(2)})
SMALL = ModelSettings(hidden=(8, 8))


@pytest.mark.parametrize("inference", ["numpy", "torch"])
@pytest.mark.parametrize("rows", [1, 5])
def test_act_gives_the_columns_it_declares(make, observations, inference, rows):
    policy = make(action_space=MIXED, inference=inference)
    assert policy.inference == inference
    actions, extras = policy.act(observations(OBS, rows))
    got = {name: (x.dtype, x.shape) for name, x in actions.items()}
    assert got == {"move": (np.int64, (rows,)), "aim": (np.float32, (rows, 2)), "keys": (np.int8, (rows, 2))}
    assert set(extras) == set(policy.extra_columns)
    for name, (shape, dtype) in policy.extra_columns.items():
        assert extras[name].shape == (rows, *shape)
        assert extras[name].dtype == dtype


def test_both_ways_of_inference_act_alike(make, observations):
    obs = observations(OBS, 300)
    by_numpy, by_torch = make(inference="numpy", seed=7), make(inference="torch", seed=7)
    for explore in (True, False):
        a, b = by_numpy.act(obs, explore), by_torch.act(obs, explore)
        np.testing.assert_array_equal(a.actions, b.actions)
        for name in a.extras:
            np.testing.assert_allclose(a.extras[name], b.extras[name], atol=1e-5)
    np.testing.assert_allclose(by_numpy.values(obs), by_torch.values(obs), atol=1e-5)
    np.testing.assert_allclose(by_numpy.values(obs), a.extras["values"], atol=1e-5)


def test_exploring_draws_in_row_order_and_the_mode_draws_nothing(make, observations):
    obs = observations(OBS, 40)
    one_call, in_parts = make(seed=3), make(seed=3)
    one_call.act(obs, explore=False)
    expected = one_call.act(obs).actions
    in_parts.act(obs[:7], explore=False)
    got = np.concatenate([in_parts.act(obs[i : i + 5]).actions.copy() for i in range(0, 40, 5)])
    np.testing.assert_array_equal(got, expected)
    assert 0 < expected.sum() < 40


def test_a_seed_repeats_everything_and_global_generators_are_untouched(make, observations, learning_batch):
    obs = observations(OBS, 50)
    torch.manual_seed(1)
    np.random.seed(1)
    torch_next, numpy_next = torch.rand(2), np.random.rand(2)
    torch.manual_seed(1)
    np.random.seed(1)
    a, b, c = make(seed=4), make(seed=4), make(seed=5)
    acted = [p.act(obs).actions.copy() for p in (a, b, c)]
    a.learn(learning_batch(a))
    assert torch.equal(torch.rand(2), torch_next)
    np.testing.assert_array_equal(np.random.rand(2), numpy_next)
    np.testing.assert_array_equal(acted[0], acted[1])
    assert (acted[0] != acted[2]).any()
    weights = [p.get_weights()["value_head.weight"] for p in (make(seed=4), make(seed=4), make(seed=5))]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).all()


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_masked_actions_are_never_taken_and_learning_sees_the_mask(make, observations, inference):
    space = Dict({"x": Box(-1, 1, (3,), np.float32), "action_mask": Box(0, 1, (5,), np.int8)})
    policy = make(obs_space=space, action_space=MultiDiscrete([2, 3]), inference=inference)
    rows = 400
    mask = np.tile(np.array([[1, 0, 0, 1, 1]], np.int8), (rows, 1))
    mask[rows // 2 :] = [0, 1, 1, 0, 0]
    obs = {"x": observations(space["x"], rows), "action_mask": mask}
    actions = policy.act(obs).actions
    assert (actions[:200, 0] == 0).all()
    assert set(actions[:200, 1]) == {1, 2}
    np.testing.assert_array_equal(actions[200:], np.tile([[1, 0]], (200, 1)))
    logp = policy.act(obs).extras["action_logp"]
    np.testing.assert_array_equal(logp[200:], np.zeros(200))
    sampled, extras = policy.act(obs)
    ones = np.ones(rows, np.float32)
    columns = {"values": ones, "advantages": ones, "value_targets": ones}
    stats = policy.learn(SampleBatch({"obs": obs, "actions": sampled, "action_logp": extras["action_logp"], **columns}))
    # On the very rows it sampled the ratio is 1: learning and acting saw the same distribution.
    assert abs(stats["approx_kl"]) < 1e-6
    assert stats["policy_gradient_loss"] == pytest.approx(-1, abs=1e-5)
    obs["action_mask"][3] = [1, 1, 0, 0, 0]
    with pytest.raises(SpaceError, match="row 3 allows no choice in component 1"):
        policy.act(obs)


def test_a_mask_without_choices_to_mask_is_refused(make):
    space = Dict({"x": OBS, "action_mask": MultiBinary(2)})
    with pytest.raises(SpaceError, match="no choices to mask"):
        make(obs_space=space, action_space=Box(-1, 1, (2,), np.float32))


class PlainLoss(PPOPolicy):
    """Brings a loss and leaves the gradients to autograd."""

    backward = TorchPolicy.backward

    def loss(self, batch):
        inputs, values = self.forward_torch(batch)
        logp = self.distribution.logp_torch(inputs, self.column(batch, "actions"))
        loss = -(logp * self.column(batch, "advantages")).mean()
        mse = (values - self.column(batch, "value_targets")).square().mean()
        return loss + 0.5 * mse, {"policy_gradient_loss": loss, "value_loss": mse}


def test_a_subclass_may_bring_only_a_loss(make, learning_batch):
    settings = PPOSettings(model=SMALL)
    mine, a2c = PlainLoss(OBS, TWO, settings), make(A2CPolicy)
    batch = learning_batch(a2c)
    gradients, stats = mine.compute_gradients(batch)
    expected, expected_stats = a2c.compute_gradients(batch)
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-6)
    assert stats == {name: pytest.approx(expected_stats[name], abs=1e-6) for name in stats}
    with pytest.raises(NotImplementedError, match="TorchPolicy implements neither"):
        TorchPolicy(OBS, TWO).compute_gradients(batch)


class Odd(ActorCritic):
    """Claims to be plain layers, but is not."""

    def forward(self, encoded):
        inputs, values = super().forward(encoded)
        return inputs, values + 1e-3


class OddPolicy(PPOPolicy):
    def make_model(self):
        return Odd(self._encoder, self.distribution, self.settings.model)


def test_a_model_that_numpy_does_not_reproduce_falls_back_to_torch(caplog):
    with caplog.at_level(logging.WARNING):
        policy = OddPolicy(OBS, TWO, PPOSettings(model=SMALL))
    assert policy.inference == "torch"
    assert isinstance(policy.model_pass, TorchPass)
    assert "off by 1.0e-03" in caplog.text
    with pytest.raises(ConfigError, match="off by"):
        OddPolicy(OBS, TWO, PPOSettings(model=SMALL, inference="numpy"))


def test_image_policies_act_and_learn_through_torch(make, learning_batch):
    space = Tuple((Box(0, 255, (36, 36, 1), np.uint8), Box(-1, 1, (2,), np.float32)))
    model = ModelSettings(image_features=8)
    policy = make(obs_space=space, action_space=MIXED, model=model)
    assert policy.inference == "torch"
    batch = learning_batch(policy, rows=6)
    before = policy.get_weights()
    policy.learn(batch)
    after = policy.get_weights()
    assert all((before[name] != after[name]).any() for name in before)
    assert num_rows(policy.act(batch["obs"]).actions) == 6
    with pytest.raises(ConfigError, match="inference='numpy'"):
        make(obs_space=space, model=model, inference="numpy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference": "nunpy"}, "did you mean 'numpy'"),
        ({"optimizer": "adan"}, "did you mean 'adam'"),
        ({"lr_schedule": "liner"}, "did you mean 'linear'"),
        ({"lr_schedule": "linear"}, "schedule_steps"),
        ({"clip_range_schedule": "linear"}, "clip_range_schedule='linear' needs schedule_steps"),
        ({"clip_range": 0.0}, "clip_range 0.0"),
        ({"learning_rate": -1.0}, "learning_rate -1.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm 0.0"),
        ({"model": {"hiden": (3,)}}, "did you mean 'hidden'"),
    ],
)
def test_wrong_settings_are_named(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_nested_model_settings_may_come_from_a_config_file():
    settings = PPOSettings(model={"hidden": [16], "activation": "relu"})
    assert settings.model == ModelSettings(hidden=(16,), activation="relu")
