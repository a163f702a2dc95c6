import copy

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from rlsample.errors import ConfigError
from rlsample.policy import A2CPolicy, A2CSettings, ModelSettings, PPOPolicy, PPOSettings
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.tree import map_tree

OBS = Box(-5, 5, (4,), np.float32)
COUNT_OBS = Box(0, 1e6, (1,), np.float32)
SMALL = ModelSettings(hidden=(8, 8))
SPACES = {
    "discrete": Discrete(3, start=1),
    "multi": MultiDiscrete([2, 3]),
    "box": Box(-1, 1, (2,), np.float32),
    "binary": MultiBinary(2),
    "dict": Dict({"a": Discrete(2), "b": Box(-1, 1, (), np.float32)}),
}


def learning_batch(policy, rows=60):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(rows, 4)).astype(np.float32)
    actions, extras = copy.deepcopy(policy.act(obs))
    shift = rng.normal(scale=0.4, size=(2, rows)).astype(np.float32)
    return SampleBatch(
        {
            "obs": obs,
            "actions": actions,
            "action_logp": extras["action_logp"] + shift[0],
            "values": extras["values"] + shift[1],
            "advantages": rng.normal(size=rows).astype(np.float32),
            "value_targets": rng.normal(size=rows).astype(np.float32),
        }
    )


def autograd(policy, batch, loss):
    """Gradients of a loss written plainly, by parameter name."""
    inputs, values = policy.model(policy._tensors(batch["obs"]))
    actions = map_tree(torch.from_numpy, batch["actions"])
    logp, entropy = policy.distribution.logp_torch(inputs, actions), policy.distribution.entropy_torch(inputs)
    columns = {k: torch.from_numpy(v) for k, v in batch.items() if k not in ("obs", "actions")}
    total = loss(logp, values, entropy, columns)
    names, parameters = zip(*policy.model.named_parameters(), strict=True)
    return total.item(), dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


@pytest.mark.parametrize("options", [{}, {"ent_coef": 0.1}, {"vf_clip": 0.3, "vf_coef": 0.7, "clip_range": 0.1}])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_ppo_gradients_equal_autograd_on_the_plain_loss(inference, space, options):
    settings = PPOSettings(model=SMALL, inference=inference, **options)
    policy = PPOPolicy(OBS, SPACES[space], settings, seed=1)
    batch = learning_batch(policy)

    def loss(logp, values, entropy, c):
        ratio = (logp - c["action_logp"]).exp()
        low, high = 1 - settings.clip_range, 1 + settings.clip_range
        surrogate = torch.min(ratio * c["advantages"], ratio.clamp(low, high) * c["advantages"]).mean()
        if settings.vf_clip is not None:
            values = c["values"] + (values - c["values"]).clamp(-settings.vf_clip, settings.vf_clip)
        mse = torch.nn.functional.mse_loss(values, c["value_targets"])
        return -surrogate + settings.vf_coef * mse - settings.ent_coef * entropy.mean()

    total, expected = autograd(policy, batch, loss)
    gradients, stats = policy.compute_gradients(batch)
    assert stats["loss"] == pytest.approx(total, abs=1e-5)
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient.numpy(), atol=1e-6, err_msg=name)
    assert np.abs(gradients["policy_head.weight"]).max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"ent_coef": 0.1, "vf_coef": 0.7}])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_a2c_gradients_equal_autograd_on_the_plain_loss(inference, space, options):
    settings = A2CSettings(model=SMALL, inference=inference, **options)
    policy = A2CPolicy(OBS, SPACES[space], settings, seed=1)
    batch = learning_batch(policy)

    def loss(logp, values, entropy, c):
        mse = torch.nn.functional.mse_loss(values, c["value_targets"])
        return -(logp * c["advantages"]).mean() + settings.vf_coef * mse - settings.ent_coef * entropy.mean()

    total, expected = autograd(policy, batch, loss)
    gradients, stats = policy.compute_gradients(batch)
    assert stats["loss"] == pytest.approx(total, abs=1e-5)
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient.numpy(), atol=1e-6, err_msg=name)


def test_statistics_have_the_usual_names_and_meanings():
    policy = PPOPolicy(OBS, Discrete(3), PPOSettings(model=SMALL, ent_coef=0.5))
    batch = learning_batch(policy)
    _, stats = policy.compute_gradients(batch)
    names = "policy_gradient_loss value_loss entropy_loss approx_kl clip_fraction explained_variance loss"
    assert list(stats) == names.split()
    assert all(type(value) is float for value in stats.values())
    # At the start the policy is all but uniform.
    assert stats["entropy_loss"] == pytest.approx(-np.log(3), abs=1e-3)
    total = stats["policy_gradient_loss"] + 0.5 * stats["value_loss"] + 0.5 * stats["entropy_loss"]
    assert stats["loss"] == pytest.approx(total, abs=1e-6)
    _, a2c_stats = A2CPolicy(OBS, Discrete(3)).compute_gradients(batch)
    assert list(a2c_stats) == ["policy_gradient_loss", "value_loss", "entropy_loss", "explained_variance", "loss"]


class TablePPO(PPOPolicy):
    """A value function given as a table; counts how often it is asked."""

    table: tuple[float, ...] = ()
    asked = 0

    def values(self, obs):
        self.asked += 1
        return np.array([self.table[int(x)] for x in obs[:, 0]], np.float32)


def table_policy(table, gamma, lam):
    policy = TablePPO(COUNT_OBS, Discrete(2), PPOSettings(gamma=gamma, gae_lambda=lam, model=SMALL))
    policy.table = table
    return policy


def count_rows(policy, first, num, terminated=False, truncated=False):
    """Rows of CountEnv from observation ``first`` on; the last one is followed by an observation of no row."""
    obs = np.arange(first, first + num, dtype=np.float32)[:, None]
    ends = np.zeros((2, num), bool)
    ends[:, -1] = terminated, truncated
    index = np.append(np.arange(1, num), -1)
    columns = {"obs": obs, "rewards": obs[:, 0] + 1, "terminated": ends[0], "truncated": ends[1]}
    columns["values"] = TablePPO.values(policy, obs)
    return SampleBatch(columns, NextObs(index, np.array([[first + num]], np.float32)))


@pytest.mark.parametrize(
    ("terminated", "truncated", "lam", "advantages", "targets"),
    [
        (False, True, 1.0, [11.52, 10.8, 8.0], [12.52, 12.8, 12.0]),
        (False, True, 0.5, [5.04, 7.2, 8.0], [6.04, 9.2, 12.0]),
        (True, False, 1.0, [4.23, 2.7, -1.0], [5.23, 4.7, 3.0]),
        (True, True, 0.5, [3.2175, 3.15, -1.0], [4.2175, 5.15, 3.0]),
    ],
)
def test_field_case_12(terminated, truncated, lam, advantages, targets):
    policy = table_policy((1, 2, 4, 10), 0.9, lam)
    batch = count_rows(policy, 0, 3, terminated, truncated)
    policy.asked = 0
    assert policy.postprocess(batch) is batch
    np.testing.assert_allclose(batch["advantages"], advantages, rtol=1e-6)
    np.testing.assert_allclose(batch["value_targets"], targets, rtol=1e-6)
    assert policy.asked == 1


def test_field_case_13_also_joined_to_one_batch():
    policy = table_policy(tuple(range(7)), 0.5, 1.0)
    parts = [count_rows(policy, 0, 3), count_rows(policy, 3, 3)]
    both = policy.postprocess(SampleBatch.concat(parts))
    np.testing.assert_array_equal(both["value_targets"], np.array([3.125, 4.25, 4.5, 8.75, 9.5, 9.0], np.float32))
    for part, expected in zip(parts, ([3.125, 4.25, 4.5], [8.75, 9.5, 9.0]), strict=True):
        np.testing.assert_array_equal(policy.postprocess(part)["value_targets"], np.array(expected, np.float32))


def test_a_stored_next_obs_gives_the_same_with_episodes_told_apart_by_their_columns():
    policy = table_policy((1, 2, 4, 10, 3, 5, 8), 0.9, 0.5)
    parts = [count_rows(policy, 0, 3, truncated=True), count_rows(policy, 0, 4), count_rows(policy, 3, 2)]
    derived = policy.postprocess(SampleBatch.concat(parts))
    stored = SampleBatch.concat([part.copy() for part in parts])
    columns = dict(stored.items())
    columns.pop("advantages", None)
    plain = SampleBatch({**columns, "next_obs": stored["next_obs"], "eps_id": np.array([7, 7, 7, 8, 8, 8, 8, 9, 9])})
    policy.postprocess(plain)
    np.testing.assert_array_equal(plain["advantages"], derived["advantages"])
    np.testing.assert_array_equal(plain["value_targets"], derived["value_targets"])
    whole = derived["advantages"][3:7]
    np.testing.assert_array_equal(policy.postprocess(count_rows(policy, 0, 4))["advantages"], whole)


def test_rows_of_one_episode_with_a_gap_between_are_two_segments():
    policy = table_policy((1, 2, 4, 10, 3), 0.9, 0.5)
    parts = [count_rows(policy, 0, 2), count_rows(policy, 3, 1)]
    derived = policy.postprocess(SampleBatch.concat(parts))
    columns = dict(SampleBatch.concat(parts).items())
    columns |= {"next_obs": derived["next_obs"], "eps_id": np.array([7, 7, 7]), "t": np.array([0, 1, 3])}
    gap = policy.postprocess(SampleBatch({k: v for k, v in columns.items() if k != "advantages"}))
    np.testing.assert_array_equal(gap["advantages"], derived["advantages"])


def test_a_batch_without_values_or_episodes_is_refused():
    policy = table_policy((1, 2, 4, 10), 0.9, 1.0)
    batch = count_rows(policy, 0, 3)
    columns = dict(batch.items())
    with pytest.raises(ConfigError, match="eps_id"):
        policy.postprocess(SampleBatch({**columns, "next_obs": batch["next_obs"]}))
    columns.pop("values")
    with pytest.raises(ConfigError, match="'values'"):
        policy.postprocess(SampleBatch(columns, batch.next_obs_source))


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
def test_learning_makes_rewarded_actions_likelier_and_values_closer(kind):
    policy = kind(OBS, Discrete(2), seed=0)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(256, 4)).astype(np.float32)
    right = (obs[:, 0] > 0).astype(np.int64)
    for _ in range(150):
        actions, extras = copy.deepcopy(policy.act(obs))
        advantages = np.where(actions == right, 1, -1).astype(np.float32)
        columns = {"obs": obs, "actions": actions, "advantages": advantages, "value_targets": obs[:, 1].copy()}
        stats = policy.learn(SampleBatch({**columns, **extras}))
    assert (policy.act(obs, explore=False).actions == right).mean() > 0.95
    assert stats["value_loss"] < 0.3
