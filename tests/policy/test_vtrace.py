"""V-trace against the paper's formula, written out literally."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.policy.gae import compute_gae
from rlsample.policy.vtrace import VTraceClips, compute_vtrace

INF = float("inf")


def literal(rho, rewards, values, next_values, terminated, gamma, rho_clip, c_clip, pg_rho_clip):
    """Equation 1 for one segment, as sums of products; the last row is the segment's end."""
    n = len(rewards)
    following = [0.0 if terminated[t] else next_values[t] for t in range(n)]
    vs = []
    for s in range(n):
        total = values[s]
        for t in range(s, n):
            trace = np.prod([min(c_clip, rho[i]) for i in range(s, t)])
            total += gamma ** (t - s) * trace * min(rho_clip, rho[t]) * (rewards[t] + gamma * following[t] - values[t])
            if terminated[t]:
                break
        vs.append(total)
    ahead = [following[t] if t == n - 1 or terminated[t] else vs[t + 1] for t in range(n)]
    advantages = [rewards[t] + gamma * ahead[t] - values[t] for t in range(n)]
    return vs, advantages, [min(pg_rho_clip, r) * a for r, a in zip(rho, advantages, strict=True)]


def segment(rng, n, ends_with):
    """Arguments of one segment of n rows."""
    terminated, end = np.zeros(n, bool), np.zeros(n, bool)
    terminated[-1], end[-1] = ends_with == "terminated", ends_with != "terminated"
    values = rng.normal(size=n).astype(np.float32)
    next_values = np.append(values[1:], rng.normal()).astype(np.float32)
    return {
        "log_rhos": rng.normal(size=n).astype(np.float32),
        "rewards": rng.normal(size=n).astype(np.float32),
        "values": values,
        "next_values": next_values,
        "terminated": terminated,
        "segment_end": end,
    }


def joined(segments):
    return {name: np.concatenate([s[name] for s in segments]) for name in segments[0]}


segments_of = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["terminated", "cut"])), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(segments_of, st.integers(0, 2**31), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.4, 1.0, 3.0, INF]))
def test_flat_rows_against_the_literal_formula(lengths, seed, gamma, c_clip):
    rng = np.random.default_rng(seed)
    parts = [segment(rng, n, end) for n, end in lengths]
    thresholds = VTraceClips(rho=1.2, c=c_clip, pg_rho=0.7)
    got = compute_vtrace(**joined(parts), gamma=gamma, clips=thresholds)
    expected = [
        literal(
            np.exp(p["log_rhos"]),
            *(p[k] for k in ("rewards", "values", "next_values", "terminated")),
            gamma,
            *thresholds,
        )
        for p in parts
    ]
    for column, wanted in zip(got, zip(*expected, strict=True), strict=False):
        assert column.dtype == np.float32
        np.testing.assert_allclose(column, np.concatenate(wanted), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.rhos, np.exp(joined(parts)["log_rhos"]), rtol=1e-6)


def test_time_major_is_flat_rows_side_by_side():
    rng = np.random.default_rng(1)
    lanes = [joined([segment(rng, 3, "terminated"), segment(rng, 4, "cut")]) for _ in range(5)]
    stacked = {name: np.stack([lane[name] for lane in lanes], 1) for name in lanes[0]}
    stacked["segment_end"][-1] = False  # the last row is an end without being marked
    got = compute_vtrace(**stacked, gamma=0.97)
    for b, lane in enumerate(lanes):
        for column, alone in zip(got, compute_vtrace(**lane, gamma=0.97), strict=True):
            np.testing.assert_array_equal(column[:, b], alone)


def test_on_policy_it_is_gae_with_lambda_one():
    parts = joined(
        [segment(np.random.default_rng(2), n, end) for n, end in ((4, "cut"), (3, "terminated"), (2, "cut"))]
    )
    parts["log_rhos"] = np.zeros_like(parts["log_rhos"])
    got = compute_vtrace(**parts, gamma=0.9)
    gae = [parts[k] for k in ("rewards", "values", "next_values", "terminated", "segment_end")]
    advantages, targets = compute_gae(*gae, 0.9, 1.0)
    np.testing.assert_allclose(got.value_targets, targets, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.advantages, advantages, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got.pg_advantages, got.advantages)


def test_a_termination_ignores_the_next_value_and_a_cut_uses_it():
    row = {"log_rhos": np.zeros(1), "rewards": np.ones(1), "values": np.array([2.0]), "next_values": np.array([10.0])}
    no, yes = np.array([False]), np.array([True])
    cut = compute_vtrace(**row, terminated=no, segment_end=yes, gamma=0.5)
    end = compute_vtrace(**row, terminated=yes, segment_end=no, gamma=0.5)
    assert (cut.value_targets[0], cut.advantages[0]) == (6.0, 4.0)
    assert (end.value_targets[0], end.advantages[0]) == (1.0, -1.0)


def test_tensors_give_what_arrays_give():
    parts = joined(
        [segment(np.random.default_rng(3), n, end) for n, end in ((5, "cut"), (1, "terminated"), (6, "cut"))]
    )
    before = {name: array.copy() for name, array in parts.items()}
    arrays = compute_vtrace(**parts, gamma=0.99, clips=VTraceClips(c=1.3))
    tensors = compute_vtrace(
        **{name: torch.from_numpy(x) for name, x in parts.items()}, gamma=0.99, clips=VTraceClips(c=1.3)
    )
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5, atol=1e-6)
    for name, array in parts.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros(3)}, "values has shape"),
        ({"rewards": np.zeros((2, 2, 2))}, "rewards have shape"),
        ({"terminated": np.zeros(2)}, "terminated has dtype float64"),
        ({"gamma": 1.1}, "gamma is 1.1"),
        ({"clips": VTraceClips(c=float("nan"))}, "clips.c is nan"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {**segment(np.random.default_rng(0), 2, "cut"), "gamma": 0.9, **change}
    with pytest.raises(ConfigError, match=message):
        compute_vtrace(**given)
