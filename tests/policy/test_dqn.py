"""DQN: targets and gradients against autograd and the formulas, epsilon, the target net, n-step batches, state."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from rlsample.errors import ConfigError, SpaceError
from rlsample.policy import DQNPolicy, DQNSettings, ModelSettings
from rlsample.sample_batch import NextObs, SampleBatch

VECTOR = Box(-5, 5, (4,), np.float32)
MASKED = Dict({"x": VECTOR, "action_mask": MultiBinary(3)})
THREE = Discrete(3, start=5)


def make(obs_space=VECTOR, seed=0, **options):
    return DQNPolicy(obs_space, THREE, DQNSettings(model=ModelSettings(hidden=(8,)), **options), seed)


def observed(space, rows, rng):
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    if space is VECTOR:
        return x
    mask = rng.random((rows, 3)) < 0.6
    mask[np.arange(rows), rng.integers(0, 3, rows)] = True
    return {"x": x, "action_mask": mask.astype(np.int8)}


def batch_of(space=VECTOR, rows=12, seed=0):
    rng = np.random.default_rng(seed)
    obs = observed(space, rows, rng)
    actions = rng.integers(5, 8, rows)
    if space is MASKED:
        actions = obs["action_mask"].argmax(1) + 5
    return SampleBatch(
        {
            "obs": obs,
            "actions": actions,
            "next_obs": observed(space, rows, rng),
            "nstep_returns": rng.normal(size=rows).astype(np.float32) * 2,
            "nstep_discounts": np.where(rng.random(rows) < 0.3, 0, 0.9).astype(np.float32),
            "weights": rng.random(rows).astype(np.float32),
            "replay_id": np.arange(rows),
        }
    )


def literal_q(policy, model, obs):
    """Q as a tensor with a graph, and what is allowed."""
    mask = np.ones((len(obs), 3)) if isinstance(obs, np.ndarray) else obs["action_mask"]
    advantages, values = model(policy._tensors(obs))
    rows = []
    for i in range(len(mask)):
        allowed = [j for j in range(3) if mask[i, j]]
        mean = sum(advantages[i, j] for j in allowed) / len(allowed)
        q = [values[i] + advantages[i, j] - mean if policy.settings.dueling else advantages[i, j] for j in range(3)]
        rows.append([q[j] if j in allowed else torch.tensor(-1e30) for j in range(3)])
    return rows


@pytest.mark.parametrize("space", [VECTOR, MASKED], ids=["vector", "masked"])
@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_gradients_and_errors_are_those_of_the_formula_by_autograd(space, dueling, double_q, inference):
    policy = make(space, dueling=dueling, double_q=double_q, inference=inference, target_update_interval=100)
    learner = make(space, seed=4, dueling=dueling, double_q=double_q)
    state = policy.get_state()
    policy.set_weights(learner.get_weights())  # the target net keeps the first weights
    batch = batch_of(space)
    target_model = make(space, dueling=dueling).model
    for name, parameter in target_model.named_parameters():
        parameter.data.copy_(torch.from_numpy(state["weights"][name]))
    q, target = literal_q(policy, policy.model, batch["obs"]), literal_q(policy, target_model, batch["next_obs"])
    online = literal_q(policy, policy.model, batch["next_obs"])
    losses, errors = [], []
    for i in range(batch.count):
        chooser = online if double_q else target
        best = max(range(3), key=lambda j: chooser[i][j].item())
        aim = batch["nstep_returns"][i] + batch["nstep_discounts"][i] * target[i][best].item()
        error = q[i][batch["actions"][i] - 5] - float(aim)
        errors.append(float(error))
        losses.append(batch["weights"][i] * torch.nn.functional.huber_loss(error, torch.zeros(())))
    policy.model.zero_grad(set_to_none=False)
    loss = sum(losses) / batch.count
    loss.backward()
    expected = {name: p.grad.numpy().copy() for name, p in policy.model.named_parameters()}
    gradients, stats = policy.compute_gradients(batch)
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=2e-4, atol=1e-6, err_msg=name)
    assert any(np.abs(g).max() > 1e-3 for g in gradients.values())
    np.testing.assert_allclose(stats.pop("td_errors"), errors, rtol=1e-4, atol=1e-5)
    assert stats["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert stats["td_error_mean"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)


def test_errors_are_given_for_replayed_rows_only():
    batch = batch_of()
    rest = SampleBatch({name: column for name, column in batch.items() if name != "replay_id"})
    assert "td_errors" in make().learn(batch)
    assert set(make().learn(rest)) == {"loss", "td_error_mean", "q_mean", "epsilon"}


def test_the_target_net_follows_every_so_many_updates():
    policy, batch = make(target_update_interval=3), batch_of()
    first = held = policy.get_weights()
    for update in range(1, 7):
        policy.learn(batch)
        target, weights = policy.get_state()["target"], policy.get_weights()
        if update % 3 == 0:
            held = weights
        for name in target:
            np.testing.assert_array_equal(target[name], held[name])
    assert any((held[name] != first[name]).any() for name in held)


def test_epsilon_greedy_frequencies_and_log_probabilities():
    policy, number = make(), 30_000
    obs = np.tile(observed(VECTOR, 1, np.random.default_rng(0)), (number, 1))
    greedy = int(policy.act(obs[:1], explore=False).actions[0])
    policy.set_progress(5_000)
    assert policy.epsilon == pytest.approx(0.51)
    out = policy.act(obs)
    counts = np.bincount(out.actions - 5, minlength=3)
    chance = np.full(3, 0.51 / 3) + np.where(np.arange(3) == greedy - 5, 0.49, 0)
    expected = number * chance
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees of freedom: 0.1 % are above
    np.testing.assert_allclose(out.extras["action_logp"], np.log(chance)[out.actions - 5], rtol=1e-5)
    for steps, epsilon in ((0, 1.0), (10_000, 0.02), (10**6, 0.02)):
        policy.set_progress(steps)
        assert policy.epsilon == pytest.approx(epsilon)


def test_epsilon_0_and_1_and_fixed():
    policy = make()
    obs = observed(VECTOR, 1000, np.random.default_rng(0))
    greedy = policy.act(obs, explore=False).actions
    policy.fix_epsilon(0.0)
    policy.set_progress(3)
    assert (policy.act(obs).actions == greedy).all()
    policy.fix_epsilon(1.0)
    random = policy.act(obs).actions
    assert 0.25 < (random == greedy).mean() < 0.42
    assert set(random.tolist()) == {5, 6, 7}
    with pytest.raises(ConfigError, match=r"1\.5"):
        policy.fix_epsilon(1.5)


def test_masked_actions_are_never_chosen():
    policy = make(MASKED)
    obs = observed(MASKED, 2000, np.random.default_rng(0))
    for explore in (True, False):
        out = policy.act(obs, explore)
        assert obs["action_mask"][np.arange(2000), out.actions - 5].all()
    policy.fix_epsilon(1.0)
    out = policy.act(obs)
    np.testing.assert_allclose(out.extras["action_logp"], -np.log(obs["action_mask"].sum(1)), atol=1e-6)


def test_a_final_observation_may_allow_nothing():
    policy, batch = make(MASKED), batch_of(MASKED)
    batch["next_obs"]["action_mask"][3] = 0
    assert np.isfinite(policy.learn(batch)["td_errors"]).all()


def test_acting_by_numpy_and_by_torch_is_the_same():
    by_numpy, by_torch = make(inference="numpy"), make(inference="torch")
    obs = observed(VECTOR, 200, np.random.default_rng(1))
    for policy in (by_numpy, by_torch):
        policy.fix_epsilon(0.3)
        policy.learn(batch_of())
    assert by_numpy.act(obs).actions.tolist() == by_torch.act(obs).actions.tolist()
    np.testing.assert_allclose(by_numpy.values(obs), by_torch.values(obs), atol=1e-5)
    best = [max(float(x) for x in row) for row in literal_q(by_torch, by_torch.model, obs)]
    np.testing.assert_allclose(by_torch.values(obs), best, atol=1e-5)


@pytest.mark.parametrize("form", ["derived", "stored"])
def test_postprocess_gives_n_step_rows(form):
    # Fragment 0: rows 0-2, cut. Fragment 1: rows 3-4, terminated; rows 5-6, truncated. Extras in another order.
    obs = np.arange(7, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    extra = np.array([60, 20, 40], np.float32)[:, None] * np.ones(4, np.float32)
    batch = SampleBatch(
        {
            "obs": obs,
            "rewards": np.array([1, 2, 4, 8, 16, 32, 64], np.float32),
            "terminated": np.arange(7) == 4,
            "truncated": np.arange(7) == 6,
            "eps_id": np.array([7, 7, 7, 8, 8, 9, 9]),
        },
        NextObs(np.array([1, 2, -2, 4, -3, 6, -1]), extra),
        np.array([3, 4]),
    )
    if form == "stored":
        batch = SampleBatch({**dict(batch.items()), "next_obs": batch["next_obs"]})
    got = make(n_step=2, gamma=0.5).postprocess(batch)
    assert got["nstep_returns"].tolist() == [2, 4, 4, 16, 16, 64, 64]
    assert got["nstep_discounts"].tolist() == [0.25, 0.25, 0.5, 0, 0, 0.25, 0.5]
    assert got["next_obs"][:, 0].tolist() == [2, 20, 20, 40, 40, 60, 60]
    assert got["rewards"].tolist() == batch["rewards"].tolist()
    assert ("next_obs" in got.keys()) == (form == "stored")  # noqa: SIM118
    one = make(n_step=1, gamma=0.5).postprocess(batch)
    assert one["nstep_returns"].tolist() == batch["rewards"].tolist()
    assert one["next_obs"][:, 0].tolist() == [1, 2, 20, 4, 40, 6, 60]
    assert "priorities" not in one


def test_priorities_from_the_worker_are_the_errors_by_its_own_weights():
    policy = make(worker_side_prioritization=True, target_update_interval=1)
    policy.set_weights(make(seed=4).get_weights())
    raw = batch_of()
    raw["rewards"], raw["terminated"] = raw["nstep_returns"], raw["nstep_discounts"] == 0
    batch = policy.postprocess(
        SampleBatch({n: raw[n] for n in ("obs", "actions", "next_obs", "rewards", "terminated")})
    )
    policy._sync_target()
    batch["replay_id"] = np.arange(batch.count)
    _, stats = policy.compute_gradients(batch)
    np.testing.assert_allclose(batch["priorities"], np.abs(stats["td_errors"]), rtol=1e-5)


def test_the_state_continues_bit_for_bit(assert_same):
    policy, batch = make(target_update_interval=3), batch_of()
    obs = observed(VECTOR, 50, np.random.default_rng(2))
    policy.set_progress(4000)
    for _ in range(4):
        policy.learn(batch)
        policy.act(obs)
    again = make(seed=9, target_update_interval=3)
    again.set_state(pickle.loads(pickle.dumps(policy.get_state())))
    for _ in range(4):
        assert policy.act(obs).actions.tolist() == again.act(obs).actions.tolist()
        policy.learn(batch)
        again.learn(batch)
    assert_same(policy.get_state(), again.get_state())


def test_refusals():
    with pytest.raises(SpaceError, match="Discrete"):
        DQNPolicy(VECTOR, Box(-1, 1, (2,)))
    for bad in ({"n_step": 0}, {"gamma": 1.5}, {"initial_epsilon": -0.1}, {"target_update_interval": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            DQNSettings(**bad)
