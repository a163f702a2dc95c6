"""n-step returns against sums written out row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.policy.n_step import compute_n_step

SEGMENTS = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from(["terminated", "truncated", "cut"])), min_size=1, max_size=6
)


@settings(deadline=None)
@given(SEGMENTS, st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(0, 2**31))
def test_against_the_literal_sums(segments, n_step, gamma, seed):
    rng = np.random.default_rng(seed)
    returns, discounts, last, terminated, end, rewards, row = [], [], [], [], [], [], 0
    for length, how in segments:
        own = rng.normal(size=length).astype(np.float32)
        for t in range(length):
            total, k = 0.0, 0
            while k < n_step and t + k < length:
                total += gamma**k * float(own[t + k])
                k += 1
            ended = t + k == length and how == "terminated"
            returns.append(total)
            discounts.append(0.0 if ended else gamma**k)
            last.append(row + t + k - 1)
        rewards += own.tolist()
        terminated += [False] * (length - 1) + [how == "terminated"]
        end += [False] * (length - 1) + [how != "terminated"]
        row += length
    got = compute_n_step(np.array(rewards, np.float32), np.array(terminated), np.array(end), n_step, gamma)
    np.testing.assert_allclose(got.returns, returns, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.discounts, discounts, rtol=1e-6)
    assert got.last.tolist() == last
    assert got.returns.dtype == got.discounts.dtype == np.float32


def test_by_hand():
    rewards = np.array([1, 2, 4, 8, 16], np.float32)
    got = compute_n_step(rewards, np.array([0, 0, 1, 0, 0], bool), np.zeros(5, bool), 2, 0.5)
    assert got.returns.tolist() == [2, 4, 4, 16, 16]
    assert got.discounts.tolist() == [0.25, 0, 0, 0.25, 0.5]
    assert got.last.tolist() == [1, 2, 2, 4, 4]
    one = compute_n_step(rewards, np.array([0, 0, 1, 0, 0], bool), np.zeros(5, bool), 1, 0.5)
    assert one.returns.tolist() == rewards.tolist()
    assert one.discounts.tolist() == [0.5, 0.5, 0, 0.5, 0.5]


def test_no_rows_and_refusals():
    none = compute_n_step(np.zeros(0, np.float32), np.zeros(0, bool), np.zeros(0, bool), 3, 0.9)
    assert [len(x) for x in none] == [0, 0, 0]
    rewards, flags = np.zeros(2, np.float32), np.zeros(2, bool)
    for bad in [(rewards, flags[:1], flags, 1, 0.9), (rewards, flags, flags, 0, 0.9), (rewards, flags, flags, 1, 1.1)]:
        with pytest.raises(ConfigError):
            compute_n_step(*bad)
    marked = np.zeros(2, bool)
    compute_n_step(rewards, marked, marked, 1, 0.9)
    assert not marked.any()  # the caller's flags stay
