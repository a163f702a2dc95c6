"""Observation filters: exact statistics however the rows are split, and no row counted twice."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.evaluation.filters import FilterDelta, MeanStdFilter, NoFilter, make_filter, synchronize

SCALAR = spaces.Box(-np.inf, np.inf, (), np.float64)
VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def seen(*values: float, space: spaces.Space = SCALAR) -> MeanStdFilter:
    f = MeanStdFilter(space)
    f(np.array(values))
    return f


def test_field_case_28_sample_std_and_frozen_statistics() -> None:
    f = seen(1, 2, 3, 4, 10)
    assert (f.count, f.mean, f.std) == (5, 4.0, pytest.approx(3.5355339, abs=1e-7))
    for batch in ([4.0, 7.5355339], [4.0], [7.5355339]):
        out = f(np.array(batch), update=False)
        assert out.dtype == np.float32
        np.testing.assert_allclose(out, (np.array(batch) - 4) / 3.5355339, atol=1e-6)
    assert (f.count, f.mean, f.delta_count) == (5, 4.0, 5)


def test_field_case_27_a_sync_counts_new_rows_only() -> None:
    rng = np.random.default_rng(0)
    master, workers = MeanStdFilter(SCALAR), [MeanStdFilter(SCALAR), MeanStdFilter(SCALAR)]
    data: list[float] = []
    for n in (20, 40, 60, 80, 100, 100):
        if len(data) < n:
            for worker in workers:
                values = rng.normal(5, 3, 10)
                data += values.tolist()
                for size in (1, 2, 3, 4):  # 1 + 2 + 3 + 4 rows
                    worker(values[size * (size - 1) // 2 :][:size])
        synchronize(master, workers)
        for f in (master, *workers):
            assert (f.count, f.delta_count) == (n, 0)
            assert f.mean == pytest.approx(np.mean(data), rel=1e-9)
            assert f.std == pytest.approx(np.std(data, ddof=1), rel=1e-9)
            assert (f.mean, f.std) == (master.mean, master.std)


floats = st.floats(-1000, 1000).map(lambda x: round(x, 6))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.tuples(floats, floats), max_size=5)), max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_any_split_over_batches_and_workers_gives_numpys_statistics(
    pieces: list[tuple[int, list[tuple[float, float]]]], syncs: list[bool]
) -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    filters = [MeanStdFilter(space) for _ in range(4)]  # the first is the master and samples too
    rows: list[tuple[float, float]] = []
    for (who, batch), sync in zip(pieces, syncs, strict=False):
        filters[who](np.array(batch, np.float64).reshape(-1, 2))
        rows += batch
        if sync:
            synchronize(filters[0], filters)
    synchronize(filters[0], filters[1:])
    for f in filters:
        assert f.count == len(rows)
        if len(rows) > 1:
            np.testing.assert_allclose(f.mean, np.mean(rows, axis=0), rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(f.std, np.std(rows, axis=0, ddof=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sizes", [[1] * 200, [64, 1, 65, 1, 1, 68], [200]])
def test_the_delta_has_every_row_whatever_the_batch_size(sizes: list[int]) -> None:
    data = np.random.default_rng(1).normal(1e4, 2, (200, 2)).astype(np.float32)
    f, start = MeanStdFilter(VECTOR), 0
    for size in sizes:
        f(data[start : start + size])
        start += size
    assert f.delta_count == 200
    delta = f.flush_delta()
    assert (delta.rows, f.delta_count, f.count) == (200, 0, 200)
    np.testing.assert_allclose(delta.mean[0], data.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(delta.m2[0], data.var(0, dtype=np.float64) * 200, rtol=1e-9)
    assert f.flush_delta().rows == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_input_is_left_alone_and_the_output_is_fresh(num_rows: int) -> None:
    f = MeanStdFilter(spaces.Box(-1e9, 1e9, (2,), np.float64))
    obs = np.arange(2.0 * num_rows).reshape(num_rows, 2)
    kept = obs.copy()
    first = f(obs)
    copy = first.copy()
    f(obs + 5)
    np.testing.assert_array_equal(obs, kept)
    np.testing.assert_array_equal(first, copy)


def test_few_rows_use_std_1_and_an_empty_batch_changes_nothing() -> None:
    f = MeanStdFilter(VECTOR)
    assert f(np.array([[3.0, 4.0]], np.float32), update=False).tolist() == [[3.0, 4.0]]
    assert f(np.array([[3.0, 4.0]], np.float32)).tolist() == [[0.0, 0.0]]
    assert f(np.array([[4.0, 2.0]], np.float32), update=False).tolist() == [[1.0, -2.0]]
    assert f(np.zeros((0, 2), np.float32)).shape == (0, 2)
    assert f.count == 1


def test_clip_limits_the_result() -> None:
    data = np.array([0.0, 1.0])
    far = np.array([1e6, -1e6])
    for clip, largest in [(10.0, 10.0), (2.5, 2.5), (None, pytest.approx(1e6 / np.std(data, ddof=1), rel=1e-3))]:
        f = MeanStdFilter(SCALAR, clip=clip)
        f(data)
        assert f(far, update=False)[0] == largest
        assert f(far[1:], update=False)[0] == (
            -largest if clip else pytest.approx(-1e6 / np.std(data, ddof=1), rel=1e-3)
        )
    constant = seen(7, 7, 7)
    assert constant(np.array([7.0, 8.0]), update=False).tolist() == [0.0, 10.0]
    with pytest.raises(ConfigError, match="clip=0"):
        MeanStdFilter(SCALAR, clip=0)


def test_trees_normalise_float_boxes_and_pass_on_the_rest() -> None:
    space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "pair": spaces.Tuple([spaces.Box(-1, 1, (1, 2), np.float64), spaces.Discrete(3)]),
            "x": spaces.Box(-1, 1, (), np.float32),
        }
    )
    f = MeanStdFilter(space)
    obs = {
        "x": np.array([1, 3], np.float32),
        "image": np.zeros((2, 2, 2), np.uint8),
        "pair": (np.array([[[0.0, 10.0]], [[2.0, 30.0]]]), np.array([1, 2])),
    }
    out = f(obs)
    r = np.sqrt(0.5)
    np.testing.assert_allclose(out["x"], [-r, r], rtol=1e-6)
    np.testing.assert_allclose(out["pair"][0], [[[-r, -r]], [[r, r]]], rtol=1e-6)
    assert out["image"] is obs["image"]
    assert out["pair"][1] is obs["pair"][1]
    assert f.mean["x"] == 2
    assert f.mean["pair"][0].tolist() == [[1, 20]]
    assert f.std["image"] is None
    assert f.observation_space == spaces.Dict(
        {
            "image": space["image"],
            "pair": spaces.Tuple([spaces.Box(-10, 10, (1, 2), np.float32), spaces.Discrete(3)]),
            "x": spaces.Box(-10, 10, (), np.float32),
        }
    )
    other = MeanStdFilter(space)
    synchronize(other, [f])
    assert other.mean["pair"][0].tolist() == [[1, 20]]


def test_a_space_without_float_box_passes_whole() -> None:
    f = MeanStdFilter(spaces.Discrete(3))
    obs = np.array([0, 2])
    assert f(obs) is obs
    assert f.flush_delta().rows == f.count == f.delta_count == 0
    f.set_state(f.get_state())


def test_rows_seen_between_flush_and_sync_are_kept_once() -> None:
    master, worker = seen(1, 2), seen(3)
    delta = worker.flush_delta()
    worker(np.array([6.0]))  # while the delta travels
    master.apply_delta(delta)
    worker.sync_from(master)
    assert (master.count, master.mean) == (3, 2.0)
    assert (worker.count, worker.mean, worker.delta_count) == (4, 3.0, 1)
    master.apply_delta(worker.flush_delta())
    assert (master.count, master.mean) == (4, 3.0)


def test_the_masters_own_rows_are_not_counted_again_when_it_takes_over_a_workers_totals() -> None:
    master, worker = seen(1, 2), seen(6)
    synchronize(master, [worker, master])
    assert (master.delta_count, master.count, master.mean) == (0, 3, 3.0)
    master.sync_from(worker)
    assert (master.count, master.mean) == (3, 3.0)


def test_a_sync_gives_copies() -> None:
    master, worker = seen(1, 2), MeanStdFilter(SCALAR)
    worker.sync_from(master)
    worker(np.array([100.0]))
    assert (master.count, master.mean) == (2, 1.5)
    worker.sync_from(worker)
    assert worker.count == 3


def test_state_is_copied_and_continues_exactly() -> None:
    f = seen(1, 2, 3.7)
    state = f.get_state()
    f(np.array([50.0]))
    g = MeanStdFilter(SCALAR)
    g.set_state(state)
    assert (g.count, g.delta_count, g.mean) == (3, 3, pytest.approx(6.7 / 3, rel=1e-15))
    state["mean"][0][...] = -1
    state["delta_mean"][0][...] = -1
    g(np.array([50.0]))
    assert (g.count, g.mean, g.std, g.flush_delta()) == (4, f.mean, f.std, f.flush_delta())
    h = pickle.loads(pickle.dumps(f))
    assert (h.count, h.mean, h.std) == (4, f.mean, f.std)
    np.testing.assert_array_equal(h(np.array([9.0])), f(np.array([9.0])))


def test_statistics_that_do_not_fit_are_refused() -> None:
    f = MeanStdFilter(VECTOR)
    with pytest.raises(ConfigError, match=r"shape \[\(2,\)\] got statistics of shape \[\(\)\]"):
        f.apply_delta(seen(1).flush_delta())
    with pytest.raises(ConfigError, match="got statistics of shape"):
        f.sync_from(seen(1))
    with pytest.raises(ConfigError, match="got statistics of shape"):
        f.set_state(seen(1).get_state())
    with pytest.raises(ConfigError, match="the state lacks 'count'; it has nothing"):
        f.set_state({})
    with pytest.raises(ConfigError, match="MeanStdFilter from a NoFilter"):
        f.sync_from(NoFilter(VECTOR))
    assert f.count == 0


def test_no_filter_changes_nothing_and_refuses_statistics() -> None:
    f, obs = NoFilter(VECTOR), np.zeros((1, 2))
    assert f(obs) is obs
    assert f.observation_space is VECTOR
    assert f.flush_delta() == FilterDelta(0, (), ())
    synchronize(f, [NoFilter(VECTOR)])
    f.set_state(f.get_state())
    with pytest.raises(ConfigError, match="a delta of 1 rows"):
        f.apply_delta(seen(1).flush_delta())
    with pytest.raises(ConfigError, match="saved with another filter"):
        f.set_state(seen(1).get_state())


def test_make_filter_by_name() -> None:
    assert type(make_filter("NoFilter", VECTOR)) is NoFilter
    assert type(make_filter("MeanStdFilter", VECTOR)) is MeanStdFilter
    assert type(make_filter("ConcurrentMeanStdFilter", VECTOR)) is MeanStdFilter
    with pytest.raises(ConfigError, match="unknown observation_filter 'MeanStd'; did you mean 'MeanStdFilter'"):
        make_filter("MeanStd", VECTOR)


def test_a_sync_from_another_thread_loses_no_row() -> None:
    master, worker = MeanStdFilter(SCALAR), MeanStdFilter(SCALAR)
    data = np.random.default_rng(2).normal(size=4000)

    def sample() -> None:
        for x in data.reshape(-1, 1):
            worker(x)

    thread = threading.Thread(target=sample)
    thread.start()
    while thread.is_alive():
        synchronize(master, [worker])
    synchronize(master, [worker])
    assert (master.count, worker.count, worker.delta_count) == (4000, 4000, 0)
    assert master.mean == pytest.approx(data.mean(), abs=1e-9)
    assert worker.std == pytest.approx(data.std(ddof=1), rel=1e-9)
