"""IMPALA and APPO: arrays against tensors, targets against the literal recursion, next values from the right place."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from rlsample.errors import ConfigError
from rlsample.optimizers.row_memory import HostRows, Memory, loaded_rows
from rlsample.policy import ModelSettings, PPOPolicy, PPOSettings
from rlsample.policy.appo import APPOPolicy, APPOSettings
from rlsample.policy.impala import IMPALAPolicy, IMPALASettings
from rlsample.policy.obs_encoding import ObsEncoder
from rlsample.policy.tensor_encoding import encode_tensors, mask_tensors
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.torch_view import as_tensor
from rlsample.tree import map_tree

VECTOR = Box(-5, 5, (3,), np.float32)
IMAGE = Box(0, 255, (36, 36, 2), np.uint8)
SETTINGS = {IMPALAPolicy: IMPALASettings, APPOPolicy: APPOSettings, PPOPolicy: PPOSettings}


def make_policy(kind=IMPALAPolicy, obs_space=VECTOR, action_space=Discrete(3), seed=0, **options):  # noqa: B008
    model = ModelSettings(hidden=(8, 8), image_features=16)
    return kind(obs_space, action_space, SETTINGS[kind](model=model, **options), seed)


def fragments_of(policy, observations, lengths=(4, 1, 3), seed=0):
    """Fragments acted in by another policy; the second ends in a termination, the others in a cut."""
    rng = np.random.default_rng(seed)
    count, stops = sum(lengths), np.cumsum(lengths)
    everything = observations(policy.observation_space, count + len(lengths), seed)
    obs = map_tree(lambda x: x[:count], everything)
    extra = map_tree(lambda x: x[count:], everything)
    out = policy.act(obs)
    terminated = np.zeros(count, bool)
    terminated[stops[1] - 1] = True
    index = np.arange(1, count + 1)
    index[stops - 1] = -1 - np.arange(len(stops))
    columns = {
        "obs": obs,
        "actions": map_tree(np.copy, out.actions),
        "action_logp": out.extras["action_logp"] + rng.normal(scale=0.4, size=count).astype(np.float32),
        "rewards": rng.normal(size=count).astype(np.float32),
        "terminated": terminated,
        "eps_id": np.repeat(np.arange(len(lengths)), lengths),
    }
    return SampleBatch(columns, NextObs(index, extra), np.array(lengths))


def loaded(batch, support):
    host = HostRows(support.columns, support.whole_fragments, Memory())
    host.fill([batch])
    return loaded_rows(host.memory.tensor, host.layout)


SPACES = [
    (VECTOR, Discrete(3)),
    (VECTOR, Box(-1, 1, (2,), np.float32)),
    (Tuple((Discrete(4, start=2), MultiDiscrete([2, 3]), VECTOR)), MultiDiscrete([2, 3])),
    (Dict({"action_mask": Box(1, 1, (3,), np.int8), "x": VECTOR}), Discrete(3)),
    (Dict({"image": IMAGE, "x": VECTOR}), Discrete(2)),
]


@pytest.mark.parametrize("kind", [IMPALAPolicy, APPOPolicy])
@pytest.mark.parametrize("spaces", SPACES, ids=["vector", "box", "tuple", "mask", "image"])
def test_the_loss_on_arrays_and_on_loaded_rows_is_one(kind, spaces, observations):
    policy = make_policy(kind, *spaces, seed=3, ent_coef=0.02)
    batch = fragments_of(policy, observations)
    gradients, stats = policy.compute_gradients(batch)
    support = policy.multi_device_support()
    policy._parameters.grad.zero_()
    loss, tensors = support.loss(loaded(batch, support))
    loss.backward()
    assert set(tensors) == set(stats)
    for name, number in stats.items():
        assert number == pytest.approx(tensors[name].item(), rel=1e-4, abs=1e-5), name
    for name, parameter in policy.model.named_parameters():
        np.testing.assert_allclose(parameter.grad.numpy(), gradients[name], rtol=1e-3, atol=1e-5, err_msg=name)
        assert np.abs(gradients[name]).max() > 0, name


def test_the_loss_on_arrays_and_on_loaded_rows_is_one_for_ppo(learning_batch):
    policy = make_policy(PPOPolicy, seed=3, ent_coef=0.02, vf_clip=0.05)
    batch = learning_batch(policy)
    batch["values"] = batch["values"] + np.random.default_rng(1).normal(scale=0.05, size=batch.count).astype(np.float32)
    gradients, stats = policy.compute_gradients(batch)
    support = policy.multi_device_support()
    policy._parameters.grad.zero_()
    loss, tensors = support.loss(loaded(batch, support))
    loss.backward()
    for name, number in stats.items():
        assert number == pytest.approx(tensors[name].item(), rel=1e-4, abs=1e-5), name
    for name, parameter in policy.model.named_parameters():
        np.testing.assert_allclose(parameter.grad.numpy(), gradients[name], rtol=1e-3, atol=1e-5, err_msg=name)


def literal_targets(policy, batch):
    """Targets by the backward recursion of the paper's remark 1, one fragment at a time."""
    s = policy.settings
    values, following = policy.values(batch["obs"]), policy.values(batch["next_obs"])
    inputs, _ = policy.forward(batch)
    rho = np.exp(policy.distribution.logp(inputs, batch["actions"]) - batch["action_logp"])
    targets, advantages = np.zeros(batch.count), np.zeros(batch.count)
    for stop, length in zip(np.cumsum(batch.fragment_lengths), batch.fragment_lengths, strict=True):
        for i in reversed(range(stop - length, stop)):
            after = following[i] if i == stop - 1 else targets[i + 1]
            value_after = following[i]
            if batch["terminated"][i]:
                after = value_after = 0.0
            delta = min(s.rho_clip, rho[i]) * (batch["rewards"][i] + s.gamma * value_after - values[i])
            later = 0.0 if i == stop - 1 else s.gamma * min(s.c_clip, rho[i]) * (targets[i + 1] - following[i])
            targets[i] = values[i] + delta + later
            advantages[i] = batch["rewards"][i] + s.gamma * after - values[i]
    return rho, values, targets, advantages


def test_impala_statistics_are_the_literal_ones(observations):
    policy = make_policy(seed=1, rho_clip=0.9, c_clip=0.8, pg_rho_clip=1.1, gamma=0.9)
    batch = fragments_of(policy, observations, (4, 2, 3, 5))
    _, stats = policy.compute_gradients(batch)
    rho, values, targets, advantages = literal_targets(policy, batch)
    inputs, _ = policy.forward(batch)
    logp = policy.distribution.logp(inputs, batch["actions"])
    assert stats["value_loss"] == pytest.approx(np.mean((values - targets) ** 2), rel=1e-4)
    assert stats["policy_gradient_loss"] == pytest.approx(-np.mean(logp * np.minimum(1.1, rho) * advantages), rel=1e-4)
    assert stats["rho_mean"] == pytest.approx(rho.mean(), rel=1e-5)
    assert stats["rho_clipped"] == pytest.approx((rho > 0.9).mean())


def test_appo_clips_the_ratio_to_the_policy_that_acted(observations):
    policy = make_policy(APPOPolicy, seed=1, clip_range=0.1, gamma=0.9)
    batch = fragments_of(policy, observations, (4, 2, 3, 5))
    _, stats = policy.compute_gradients(batch)
    rho, _, _, advantages = literal_targets(policy, batch)
    surrogate = np.minimum(rho * advantages, np.clip(rho, 0.9, 1.1) * advantages)
    assert stats["policy_gradient_loss"] == pytest.approx(-surrogate.mean(), rel=1e-4)
    assert stats["clip_fraction"] == pytest.approx((np.abs(rho - 1) > 0.1).mean())


def test_rows_without_derived_next_obs_learn_alike(observations):
    policy = make_policy(seed=2)
    batch = fragments_of(policy, observations)
    stored = SampleBatch({**{name: batch[name] for name in batch}, "next_obs": batch["next_obs"]})
    for name, number in policy.compute_gradients(batch)[1].items():
        assert policy.compute_gradients(stored)[1][name] == pytest.approx(number, rel=1e-5), name


@pytest.mark.parametrize("drop", ["terminated", "action_logp", "next_obs"])
def test_missing_columns_are_named(observations, drop):
    policy = make_policy()
    batch = fragments_of(policy, observations)
    columns = {name: batch[name] for name in batch if name != drop}
    with pytest.raises(ConfigError, match=drop if drop != "next_obs" else "next observations"):
        policy.compute_gradients(SampleBatch(columns, None if drop == "next_obs" else batch.next_obs_source))


@pytest.mark.parametrize("spaces", SPACES, ids=["vector", "box", "tuple", "mask", "image"])
def test_tensors_are_encoded_as_arrays_are(spaces, observations):
    encoder, obs = ObsEncoder(spaces[0]), observations(spaces[0], 6)
    wanted, got = encoder.encode(obs), encode_tensors(encoder, map_tree(as_tensor, obs))
    np.testing.assert_array_equal(got.flat.numpy(), wanted.flat)
    assert len(got.images) == len(wanted.images)
    for tensor, array in zip(got.images, wanted.images, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    if encoder.has_mask:
        np.testing.assert_array_equal(mask_tensors(map_tree(as_tensor, obs)).numpy(), encoder.mask(obs))


def test_a_pickled_support_trains_on_as_the_original(observations):
    policy = make_policy(seed=5)
    batch = fragments_of(policy, observations)
    policy.learn(batch)  # optimizer state that is not the initial one
    original = policy.multi_device_support()
    copy = pickle.loads(pickle.dumps(original))
    assert copy.to("cpu") is copy
    for support in (original, copy):
        support.policy._parameters.grad.zero_()
        support.loss(loaded(batch, support))[0].backward()
        support.update()
    for mine, theirs in zip(original.module.parameters(), copy.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


def test_thresholds_are_checked():
    with pytest.raises(ConfigError, match="c_clip -1"):
        IMPALASettings(c_clip=-1)
    with pytest.raises(ConfigError, match="clip_range 0"):
        APPOSettings(clip_range=0)
