import copy
import io
import logging
import sys
import threading

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from rlsample.errors import ConfigError, SpaceError
from rlsample.policy import A2CPolicy, A2CSettings, ModelSettings, PPOPolicy, PPOSettings, TorchPolicy
from rlsample.policy.model_passes import TorchPass
from rlsample.policy.models import ActorCritic
from rlsample.sample_batch import SampleBatch
from rlsample.tree import leaves, num_rows

OBS = Box(-5, 5, (4,), np.float32)
TWO = Discrete(2)
MIXED = Dict({"move": Discrete(3, start=2), "aim": Box(-1, 1, (2,), np.float32), "keys": MultiBinary(2)})
SMALL = ModelSettings(hidden=(8, 8))


def make(kind=PPOPolicy, obs_space=OBS, action_space=TWO, seed=0, **options):
    settings = {PPOPolicy: PPOSettings, A2CPolicy: A2CSettings}[kind](**{"model": SMALL, **options})
    return kind(obs_space, action_space, settings, seed)


def observations(space, rows, seed=0):
    space.seed(seed)
    samples = [space.sample() for _ in range(rows)]

    def stack(items):
        if isinstance(items[0], dict):
            return {k: stack([x[k] for x in items]) for k in items[0]}
        if isinstance(items[0], tuple):
            return tuple(stack([x[i] for x in items]) for i in range(len(items[0])))
        return np.asarray(items)

    return stack(samples)


def learning_batch(policy, rows=32, seed=0):
    rng = np.random.default_rng(seed)
    obs = observations(policy.observation_space, rows, seed)
    actions, extras = copy.deepcopy(policy.act(obs))
    return SampleBatch(
        {
            "obs": obs,
            "actions": actions,
            "action_logp": extras["action_logp"] + rng.normal(scale=0.3, size=rows).astype(np.float32),
            "values": extras["values"],
            "advantages": rng.normal(size=rows).astype(np.float32),
            "value_targets": rng.normal(size=rows).astype(np.float32),
        }
    )


def assert_same(a, b):
    assert set(a) == set(b)
    for name in a:
        if isinstance(a[name], dict):
            assert_same(a[name], b[name])
        else:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("inference", ["numpy", "torch"])
@pytest.mark.parametrize("rows", [1, 5])
def test_act_gives_the_columns_it_declares(inference, rows):
    policy = make(action_space=MIXED, inference=inference)
    assert policy.inference == inference
    actions, extras = policy.act(observations(OBS, rows))
    got = {name: (x.dtype, x.shape) for name, x in actions.items()}
    assert got == {"move": (np.int64, (rows,)), "aim": (np.float32, (rows, 2)), "keys": (np.int8, (rows, 2))}
    assert set(extras) == set(policy.extra_columns)
    for name, (shape, dtype) in policy.extra_columns.items():
        assert extras[name].shape == (rows, *shape)
        assert extras[name].dtype == dtype


def test_both_ways_of_inference_act_alike():
    obs = observations(OBS, 300)
    by_numpy, by_torch = make(inference="numpy", seed=7), make(inference="torch", seed=7)
    for explore in (True, False):
        a, b = by_numpy.act(obs, explore), by_torch.act(obs, explore)
        np.testing.assert_array_equal(a.actions, b.actions)
        for name in a.extras:
            np.testing.assert_allclose(a.extras[name], b.extras[name], atol=1e-5)
    np.testing.assert_allclose(by_numpy.values(obs), by_torch.values(obs), atol=1e-5)
    np.testing.assert_allclose(by_numpy.values(obs), a.extras["values"], atol=1e-5)


def test_exploring_draws_in_row_order_and_the_mode_draws_nothing():
    obs = observations(OBS, 40)
    one_call, in_parts = make(seed=3), make(seed=3)
    one_call.act(obs, explore=False)
    expected = one_call.act(obs).actions
    in_parts.act(obs[:7], explore=False)
    got = np.concatenate([in_parts.act(obs[i : i + 5]).actions.copy() for i in range(0, 40, 5)])
    np.testing.assert_array_equal(got, expected)
    assert 0 < expected.sum() < 40


def test_a_seed_repeats_everything_and_global_generators_are_untouched():
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


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_masked_actions_are_never_taken_and_learning_sees_the_mask(inference):
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


def test_a_mask_without_choices_to_mask_is_refused():
    space = Dict({"x": OBS, "action_mask": MultiBinary(2)})
    with pytest.raises(SpaceError, match="no choices to mask"):
        make(obs_space=space, action_space=Box(-1, 1, (2,), np.float32))


# Field case 29: what is handed out is a copy, what is taken in is copied.


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
def test_weights_gradients_and_state_are_copies(kind):
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


def test_values_are_a_fresh_array():
    policy = make()
    obs = observations(OBS, 6)
    values = policy.values(obs)
    kept = values.copy()
    policy.values(obs + 1)
    policy.act(obs + 1)
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_acting_uses_new_weights_at_once(inference):
    policy, other = make(seed=1, inference=inference), make(seed=2, inference=inference)
    obs = observations(OBS, 9)
    other_values = other.act(obs, explore=False).extras["values"].copy()
    policy.act(obs)
    policy.set_weights(other.get_weights())
    np.testing.assert_array_equal(policy.values(obs), other.values(obs))
    np.testing.assert_array_equal(policy.act(obs, explore=False).extras["values"], other_values)


@pytest.mark.parametrize("kind", [PPOPolicy, A2CPolicy])
@pytest.mark.parametrize("action_space", [TWO, MIXED])
def test_learn_is_compute_and_apply(kind, action_space):
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


def test_versions_count_every_change_of_weights():
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
def test_a_restored_policy_continues_bit_for_bit(kind, action_space, inference):
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
def test_a_state_of_the_same_version_but_other_weights_is_acted_on_at_once(inference):
    policy, other = make(seed=1, inference=inference), make(seed=2, inference=inference)
    obs = observations(OBS, 9)
    values = policy.values(obs)
    other.act(obs)
    other.set_state(policy.get_state())
    np.testing.assert_array_equal(other.values(obs), values)
    np.testing.assert_array_equal(other.act(obs).actions, policy.act(obs).actions)


def test_a_state_holds_only_plain_data_and_survives_a_restricted_load():
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


def test_weights_that_do_not_fit_are_refused_and_nothing_changes():
    policy = make()
    before = policy.get_weights()
    missing = {name: w + 1 for name, w in before.items() if name != "value_head.bias"}
    with pytest.raises(ConfigError, match="value_head"):
        policy.set_weights(missing)
    with pytest.raises(ConfigError, match=r"policy_head.weight has shape \(2, 9\), the model's has \(2, 8\)"):
        policy.set_weights({**before, "policy_head.weight": np.zeros((2, 9))})
    assert_same(policy.get_weights(), before)
    assert policy.version == 0


def test_gradients_are_clipped_to_their_common_norm_when_applied():
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
def test_a_loss_that_is_nan_names_the_statistic_and_leaves_the_weights(kind):
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


def test_an_empty_batch_is_refused():
    policy = make()
    batch = learning_batch(policy).slice(0, 0)
    with pytest.raises(ConfigError, match="0 rows"):
        policy.learn(batch)


def test_linear_schedules_end_at_zero_and_do_not_go_below():
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
def test_torn_weights_are_never_acted_on(inference):
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


class PlainLoss(PPOPolicy):
    """Brings a loss and leaves the gradients to autograd."""

    backward = TorchPolicy.backward

    def loss(self, batch):
        inputs, values = self.forward_torch(batch)
        logp = self.distribution.logp_torch(inputs, self.column(batch, "actions"))
        loss = -(logp * self.column(batch, "advantages")).mean()
        mse = (values - self.column(batch, "value_targets")).square().mean()
        return loss + 0.5 * mse, {"policy_gradient_loss": loss, "value_loss": mse}


def test_a_subclass_may_bring_only_a_loss():
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
    def make_model(self, seed):
        return Odd(self._encoder, self.distribution, self.settings.model)


def test_a_model_that_numpy_does_not_reproduce_falls_back_to_torch(caplog):
    with caplog.at_level(logging.WARNING):
        policy = OddPolicy(OBS, TWO, PPOSettings(model=SMALL))
    assert policy.inference == "torch"
    assert isinstance(policy.model_pass, TorchPass)
    assert "off by 1.0e-03" in caplog.text
    with pytest.raises(ConfigError, match="off by"):
        OddPolicy(OBS, TWO, PPOSettings(model=SMALL, inference="numpy"))


def test_image_policies_act_and_learn_through_torch():
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
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_nested_model_settings_may_come_from_a_config_file():
    settings = PPOSettings(model={"hidden": [16], "activation": "relu"})
    assert settings.model == ModelSettings(hidden=(16,), activation="relu")
