import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.policy.gae import compute_gae, discounted_returns


def flags(*rows):
    return np.array(rows, bool)


def literal_gae(rewards, values, next_values, terminated, segment_end, gamma, lam):
    advantages = [0.0] * len(rewards)
    for i in reversed(range(len(rewards))):
        bootstrap = 0.0 if terminated[i] else gamma * float(next_values[i])
        advantages[i] = float(rewards[i]) + bootstrap - float(values[i])
        if not (terminated[i] or segment_end[i] or i + 1 == len(rewards)):
            advantages[i] += gamma * lam * advantages[i + 1]
    return np.array(advantages)


def literal_returns(rewards, next_values, terminated, segment_end, gamma):
    returns = [0.0] * len(rewards)
    for i in reversed(range(len(rewards))):
        if terminated[i]:
            follows = 0.0
        elif segment_end[i] or i + 1 == len(rewards):
            follows = float(next_values[i])
        else:
            follows = returns[i + 1]
        returns[i] = float(rewards[i]) + gamma * follows
    return np.array(returns)


# Field case 12: CountEnv(3), gamma 0.9, V = {0: 1, 1: 2, 2: 4, 3: 10}.
COUNT = {
    "rewards": np.array([1, 2, 3], np.float32),
    "values": np.array([1, 2, 4], np.float32),
    "next_values": np.array([2, 4, 10], np.float32),
    "segment_end": flags(0, 0, 1),
    "gamma": 0.9,
}


@pytest.mark.parametrize(
    ("terminated", "lam", "advantages", "targets"),
    [
        (False, 1.0, [11.52, 10.8, 8.0], [12.52, 12.8, 12.0]),
        (False, 0.5, [5.04, 7.2, 8.0], [6.04, 9.2, 12.0]),
        (True, 1.0, [4.23, 2.7, -1.0], [5.23, 4.7, 3.0]),
        (True, 0.5, [3.2175, 3.15, -1.0], [4.2175, 5.15, 3.0]),
    ],
)
def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(
    terminated, lam, advantages, targets
):
    got = compute_gae(**COUNT, terminated=flags(0, 0, terminated), lam=lam)
    np.testing.assert_allclose(got[0], advantages, rtol=1e-6)
    np.testing.assert_allclose(got[1], targets, rtol=1e-6)


@pytest.mark.parametrize(("start", "targets"), [(0, [3.125, 4.25, 4.5]), (3, [8.75, 9.5, 9.0])])
def test_a_cut_in_mid_episode_bootstraps_from_the_observation_after_it(start, targets):
    # Field case 13: CountEnv("never"), fragments of 3, V(o) = o, gamma 0.5.
    obs = np.arange(start, start + 3, dtype=np.float32)
    none = flags(0, 0, 0)
    got = compute_gae(obs + 1, obs, obs + 1, none, flags(0, 0, 1), gamma=0.5, lam=1.0)
    np.testing.assert_array_equal(got[1], np.array(targets, np.float32))
    returns = discounted_returns(obs + 1, obs + 1, none, flags(0, 0, 1), gamma=0.5)
    np.testing.assert_array_equal(returns, np.array(targets, np.float32))


rows = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        *[st.lists(st.integers(-50, 50), min_size=n, max_size=n) for _ in range(3)],
        *[st.lists(st.booleans(), min_size=n, max_size=n) for _ in range(2)],
    )
)
factor = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


@given(rows, factor, factor)
def test_flat_rows_of_any_segment_lengths_equal_the_row_by_row_form(data, gamma, lam):
    rewards, values, next_values = (np.array(x, np.float32) for x in data[:3])
    terminated, ends = (np.array(x, bool) for x in data[3:])
    expected = literal_gae(rewards, values, next_values, terminated, ends, gamma, lam)
    advantages, targets = compute_gae(rewards, values, next_values, terminated, ends, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(targets, expected + values, rtol=1e-5, atol=1e-4)
    assert advantages.dtype == targets.dtype == np.float32
    returns = discounted_returns(rewards, next_values, terminated, ends, gamma)
    np.testing.assert_allclose(
        returns, literal_returns(rewards, next_values, terminated, ends, gamma), rtol=1e-5, atol=1e-4
    )


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_time_major_equals_its_columns_one_by_one(num_steps, num_slots, seed):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, num_steps, num_slots)).astype(np.float32)
    terminated, ends = rng.random((2, num_steps, num_slots)) < 0.3
    advantages, _ = compute_gae(rewards, values, next_values, terminated, ends, 0.9, 0.8)
    returns = discounted_returns(rewards, next_values, terminated, ends, 0.9)
    for b in range(num_slots):
        column = [x[:, b] for x in (rewards, values, next_values, terminated, ends)]
        np.testing.assert_allclose(advantages[:, b], literal_gae(*column, 0.9, 0.8), rtol=1e-5, atol=1e-5)
        expected = literal_returns(column[0], *column[2:], 0.9)
        np.testing.assert_allclose(returns[:, b], expected, rtol=1e-5, atol=1e-5)


def test_the_arguments_are_left_as_they_are():
    before = {k: np.copy(v) for k, v in COUNT.items()}
    ended = flags(0, 1, 0)
    compute_gae(**COUNT, terminated=ended, lam=0.5)
    discounted_returns(COUNT["rewards"], COUNT["next_values"], ended, COUNT["segment_end"], 0.9)
    for name, array in before.items():
        np.testing.assert_array_equal(COUNT[name], array)
    np.testing.assert_array_equal(ended, flags(0, 1, 0))


def test_a_long_segment_keeps_its_precision():
    n = 5000
    ones, never = np.ones(n, np.float32), np.zeros(n, bool)
    returns = discounted_returns(ones, np.full(n, 100, np.float32), never, never, 0.99)
    np.testing.assert_allclose(returns, np.full(n, 100.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((3, 1), np.float32)}, r"values has shape \(3, 1\), rewards have \(3,\)"),
        ({"next_values": np.zeros(4, np.float32)}, r"next_values has shape \(4,\)"),
        ({"terminated": np.zeros(3, np.float32)}, "terminated has dtype float32; expected bool"),
        ({"segment_end": np.zeros(3, np.int64)}, "segment_end has dtype int64; expected bool"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"rewards": np.zeros((1, 1, 3), np.float32)}, r"rewards have shape \(1, 1, 3\)"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        compute_gae(**{**COUNT, "terminated": flags(0, 0, 1), "lam": 0.5, **change})
