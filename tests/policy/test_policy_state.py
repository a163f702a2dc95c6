import copy
import io
import sys
import threading

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from rlsample.errors import ConfigError
from rlsample.policy import A2CPolicy, ModelSettings, PPOPolicy
from rlsample.tree import leaves

OBS = Box(-5, 5, (4,), np.float32)
TWO = Discrete(2)
MIXED = Dict({"move": Discrete(3, start=2), "aim": Box(-1, 1, (2,), np.float32), "keys": MultiBinary(2)})
SMALL = ModelSettings(hidden=(8, 8))


# Field case 29: what is handed out is a copy, what is taken in is copied.


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
def test_weights_gradients_and_state_are_copies(make, observations, learning_batch, assert_same, kind):
    policy = make(kind)
    obs = observations(OBS, 6)
    policy.learn(learning_batch(policy))
    weights, state = policy.get_weights(), policy.get_state()
    kept_weights, kept_state = copy.deepcopy(weights), copy.deepcopy(state)
    before = policy.act(obs, explore=False).extras["values"].copy()

    policy.apply_gradients({name: np.ones_like(w) for name, w in weights.items()})
    assert_same(weights, kept_weights)
    assert_same(state, kept_state)
    assert np.abs(policy.act(obs, explore=False).extras["values"] - before).min() > 0

    policy.set_weights(weights)
    np.testing.assert_array_equal(policy.act(obs, explore=False).extras["values"], before)
    for w in weights.values():
        w += 1
    np.testing.assert_array_equal(policy.act(obs, explore=False).extras["values"], before)
    assert_same(policy.get_weights(), kept_weights)

    first, _ = policy.compute_gradients(learning_batch(policy, seed=1))
    kept = copy.deepcopy(first)
    second, _ = policy.compute_gradients(learning_batch(policy, seed=2))
    assert_same(first, kept)
    assert all(np.abs(first[name] - second[name]).max() > 0 for name in first)
    assert set(first) == set(kept_weights)


def test_values_are_a_fresh_array(make, observations):
    policy = make()
    obs = observations(OBS, 6)
    values = policy.values(obs)
    kept = values.copy()
    policy.values(obs + 1)
    policy.act(obs + 1)
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_acting_uses_new_weights_at_once(make, observations, inference):
    policy, other = make(seed=1, inference=inference), make(seed=2, inference=inference)
    obs = observations(OBS, 9)
    other_values = other.act(obs, explore=False).extras["values"].copy()
    policy.act(obs)
    policy.set_weights(other.get_weights())
    np.testing.assert_array_equal(policy.values(obs), other.values(obs))
    np.testing.assert_array_equal(policy.act(obs, explore=False).extras["values"], other_values)


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
@pytest.mark.parametrize("action_space", [TWO, MIXED])
def test_learn_is_compute_and_apply(make, learning_batch, assert_same, kind, action_space):
    whole, parts = make(kind, action_space=action_space), make(kind, action_space=action_space)
    for seed in range(4):
        batch = learning_batch(whole, seed=seed)
        stats = whole.learn(batch)
        before = parts.get_weights()
        gradients, other_stats = parts.compute_gradients(batch)
        assert_same(parts.get_weights(), before)
        assert parts.version == seed
        parts.apply_gradients(gradients)
        assert stats == other_stats
        assert_same(whole.get_weights(), parts.get_weights())
        assert whole.version == parts.version == seed + 1


def test_versions_count_every_change_of_weights(make, learning_batch):
    policy = make()
    assert policy.version == 0
    policy.set_weights(policy.get_weights())
    policy.learn(learning_batch(policy))
    gradients, _ = policy.compute_gradients(learning_batch(policy))
    assert policy.version == 2
    policy.apply_gradients(gradients)
    assert policy.version == 3


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
@pytest.mark.parametrize("action_space", [TWO, MIXED])
@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_a_restored_policy_continues_bit_for_bit(
    make, observations, learning_batch, assert_same, kind, action_space, inference
):
    options = {"lr_schedule": "linear", "schedule_steps": 1000, "inference": inference}
    policy = make(kind, action_space=action_space, seed=1, **options)
    obs = observations(OBS, 20)
    for seed in range(3):
        policy.act(obs)
        policy.set_progress(100 * seed)
        policy.learn(learning_batch(policy, seed=seed))
    state = copy.deepcopy(policy.get_state())
    other = make(kind, action_space=action_space, seed=2, **options)
    other.learn(learning_batch(other, seed=9))
    other.act(obs)
    other.set_state(state)
    assert other.version == policy.version == 3
    assert_same(other.get_state(), state)
    for seed in range(3, 6):
        batch = learning_batch(policy, seed=seed)
        theirs = learning_batch(other, seed=seed)
        for name in batch:
            for x, y in zip(leaves(batch[name]), leaves(theirs[name]), strict=True):
                np.testing.assert_array_equal(x, y)
        assert policy.learn(batch) == other.learn(theirs)
    assert_same(policy.get_state(), other.get_state())


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_a_state_of_the_same_version_but_other_weights_is_acted_on_at_once(make, observations, inference):
    policy, other = make(seed=1, inference=inference), make(seed=2, inference=inference)
    obs = observations(OBS, 9)
    values = policy.values(obs)
    other.act(obs)
    other.set_state(policy.get_state())
    np.testing.assert_array_equal(other.values(obs), values)
    np.testing.assert_array_equal(other.act(obs).actions, policy.act(obs).actions)


def test_a_state_holds_only_plain_data_and_survives_a_restricted_load(make, learning_batch, assert_same):
    policy = make()
    policy.learn(learning_batch(policy))

    def as_tensors(x):
        if isinstance(x, dict):
            return {key: as_tensors(value) for key, value in x.items()}
        assert type(x) in (np.ndarray, int, float, str)
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    file = io.BytesIO()
    torch.save(as_tensors(policy.get_state()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    loaded = {
        **loaded,
        "weights": {k: v.numpy() for k, v in loaded["weights"].items()},
        "optimizer": {k: v.numpy() if torch.is_tensor(v) else v for k, v in loaded["optimizer"].items()},
    }
    other = make(seed=8)
    other.set_state(loaded)
    assert_same(other.get_state(), policy.get_state())


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(make, assert_same):
    policy = make()
    before = policy.get_weights()
    missing = {name: w + 1 for name, w in before.items() if name != "value_head.bias"}
    with pytest.raises(ConfigError, match="value_head"):
        policy.set_weights(missing)
    with pytest.raises(ConfigError, match=r"policy_head.weight has shape \(2, 9\), the model's has \(2, 8\)"):
        policy.set_weights({**before, "policy_head.weight": np.zeros((2, 9))})
    assert_same(policy.get_weights(), before)
    assert policy.version == 0


def test_gradients_are_clipped_to_their_common_norm_when_applied(make):
    def moved(scale, limit):
        policy = make(optimizer="rmsprop", max_grad_norm=limit, optimizer_eps=1e3, learning_rate=1e3)
        before = policy.get_weights()
        policy.apply_gradients({name: np.full_like(w, scale) for name, w in before.items()})
        after = policy.get_weights()
        return np.concatenate([(before[name] - after[name]).ravel() for name in before])

    # With so large an epsilon the step is the gradient itself.
    free = moved(2.0, None)
    np.testing.assert_allclose(free, np.full_like(free, 2.0), rtol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(moved(2.0, 0.5)), 0.5, rtol=1e-3)
    small = 0.1 / len(free) ** 0.5
    np.testing.assert_allclose(np.linalg.norm(moved(small, 0.5)), 0.1, rtol=1e-3)


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
def test_a_loss_that_is_nan_names_the_statistic_and_leaves_the_weights(make, learning_batch, assert_same, kind):
    policy = make(kind)
    before = policy.get_weights()
    for column, name in (("advantages", "policy_gradient_loss"), ("value_targets", "value_loss")):
        batch = learning_batch(policy)
        batch[column][3] = np.nan
        with pytest.raises(FloatingPointError, match=f"{name} is nan"):
            policy.learn(batch)
    with pytest.raises(FloatingPointError, match="norm of the gradient is inf"):
        policy.apply_gradients({name: np.full_like(w, np.inf) for name, w in before.items()})
    assert_same(policy.get_weights(), before)
    assert policy.version == 0


def test_an_empty_batch_is_refused(make, learning_batch):
    policy = make()
    batch = learning_batch(policy).slice(0, 0)
    with pytest.raises(ConfigError, match="0 rows"):
        policy.learn(batch)


def test_linear_schedules_end_at_zero_and_do_not_go_below(make):
    options = {"lr_schedule": "linear", "clip_range_schedule": "linear", "schedule_steps": 1000, "learning_rate": 0.4}
    policy = make(optimizer="rmsprop", optimizer_eps=1e3, max_grad_norm=None, **options)
    ones = {name: np.full_like(w, 1e3) for name, w in policy.get_weights().items()}
    steps = []
    for progress in (0, 250, 1000, 5000):
        policy.set_progress(progress)
        before = policy.get_weights()["value_head.bias"]
        policy.apply_gradients(ones)
        steps.append(float((before - policy.get_weights()["value_head.bias"])[0]))
    assert steps[1] / steps[0] == pytest.approx(0.75, rel=0.2)
    assert steps[2:] == [0, 0]
    assert policy.remaining("linear") == 0
    assert policy.remaining("constant") == 1


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_torn_weights_are_never_acted_on(make, inference):
    # All weights of a version are equal; a forward pass over a mixture of versions gives a value of none of them.
    model = ModelSettings(hidden=(64, 64), activation="relu")
    policy = make(obs_space=Box(0, 1, (1,), np.float32), model=model, inference=inference)
    weights = [{name: np.full_like(w, i) for name, w in policy.get_weights().items()} for i in range(4)]
    obs = np.ones((1, 1), np.float32)
    allowed = set()
    for w in weights:
        policy.set_weights(w)
        allowed.add(float(policy.act(obs, explore=False).extras["values"][0]))
    assert len(allowed) == 4
    stop = threading.Event()

    def change():
        i = 0
        while not stop.is_set():
            i = (i + 1) % 4
            policy.set_weights(weights[i])

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        seen = {float(policy.act(obs, explore=False).extras["values"][0]) for _ in range(1000)}
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert seen <= allowed
    assert len(seen) > 1
