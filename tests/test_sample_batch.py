"""SampleBatch: rows stay aligned, next_obs is the right one after any cut, and what says view is a view."""

from __future__ import annotations

import itertools
import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsample import tree
from rlsample.errors import ConfigError
from rlsample.sample_batch import NextObs, SampleBatch


def lanes(lengths: list[int], *, episode_ends: set[int] = frozenset()) -> tuple[SampleBatch, np.ndarray]:
    """A batch as the sampler makes it, and its next observations spelled out row by row.

    Row r of lane L at step s has observation 1000 * L + s; the step after a lane's last row, or after a row in
    ``episode_ends``, is an extra observation: 0.5 more.
    """
    obs, index, extra, naive, eps = [], [], [], [], []
    for lane, length in enumerate(lengths):
        for step in range(length):
            row = len(obs)
            obs.append(1000.0 * lane + step)
            eps.append(100 * lane + sum(e < row for e in episode_ends))
            if step == length - 1 or row in episode_ends:
                extra.append(obs[-1] + 0.5)
                index.append(-len(extra))
                naive.append(extra[-1])
            else:
                index.append(row + 1)
                naive.append(obs[-1] + 1)
    n = len(obs)
    columns = {
        "obs": np.array(obs, np.float64).reshape(n, 1),
        "rewards": np.arange(n, dtype=np.float32) * 10,
        "eps_id": np.array(eps, np.int64),
        "actions": {"a": np.arange(n, dtype=np.int64) + 7, "b": (np.arange(2 * n).reshape(n, 2),)},
    }
    nxt = NextObs(np.array(index, np.int64), np.array(extra, np.float64).reshape(len(extra), 1))
    return SampleBatch(columns, nxt, np.array(lengths)), np.array(naive).reshape(n, 1)


def assert_same(a: SampleBatch, b: SampleBatch) -> None:
    assert set(a) == set(b)
    assert len(a) == len(b)
    for name in a:
        for (path, x), (_, y) in zip(tree.flatten(a[name]), tree.flatten(b[name]), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y, err_msg=f"{name}{path}")


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=5)
batches = st.tuples(shapes, st.sets(st.integers(0, 20))).map(lambda a: lanes(a[0], episode_ends=a[1]))


def cut(n: int, points: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(p % (n + 1) for p in points), n]
    return list(itertools.pairwise(edges))


def test_columns_are_held_not_copied_and_read_as_a_mapping() -> None:
    obs, actions = np.zeros((3, 2), np.uint8), {"x": np.arange(3), "y": (np.ones((3, 1), np.float32),)}
    batch = SampleBatch({"obs": obs, "actions": actions})
    assert (len(batch), batch.count) == (3, 3)
    assert batch["obs"] is obs
    assert batch["actions"] is actions
    assert list(batch) == list(batch.keys()) == ["obs", "actions"]
    assert [name for name, _ in batch.items()] == ["obs", "actions"]
    assert batch.get("obs") is obs
    assert batch.get("rewards", 5) == 5
    assert "rewards" not in batch
    assert "next_obs" not in batch
    assert batch.nbytes == 6 + 24 + 12
    assert repr(batch) == "SampleBatch(3 rows; obs: uint8[3, 2], actions.x: int64[3], actions.y[0]: float32[3, 1])"
    batch["rewards"] = np.arange(3)
    assert batch["rewards"].tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="did you mean 'rewards'"):
        batch["reward"]
    with pytest.raises(KeyError, match=r"slice\(\) or select\(\)"):
        batch[0]


def test_a_batch_without_columns_takes_its_length_from_the_first_one() -> None:
    batch = SampleBatch({})
    assert len(batch) == 0
    batch["obs"] = np.zeros(4)
    assert len(batch) == 4


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.zeros(4), "column 'x' has 4 rows, column 'obs' has 3"),
        ({"p": np.zeros(3), "q": (np.zeros(2),)}, r"column 'x' \(at q\[0\]\) has 2 rows, column 'obs' has 3"),
        ([1, 2, 3], "column 'x': expected an array, or a dict or tuple of arrays, got list"),
        (np.float32(1), "got float32"),
        (np.array(1.0), "0-d float64"),
        ({}, "column 'x': .* got an empty tree"),
    ],
)
def test_a_column_that_does_not_fit_is_named(column: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleBatch({"obs": np.zeros(3), "x": column})
    batch = SampleBatch({"obs": np.zeros(3)})
    with pytest.raises(ConfigError, match=message):
        batch["x"] = column
    assert list(batch) == ["obs"]


@pytest.mark.parametrize(
    ("nxt", "message"),
    [
        (NextObs(np.array([1]), np.zeros(1)), "1 entries for 2 rows"),
        (NextObs(np.array([2, -1]), np.zeros(1)), "from -1 to 2, .* 1 extra .* 2 in the source"),
        (NextObs(np.array([1, -2]), np.zeros(1)), "from -2 to 1"),
    ],
)
def test_a_next_obs_index_that_points_nowhere_is_refused(nxt: NextObs, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleBatch({"obs": np.zeros(2)}, nxt)


def test_next_obs_without_an_obs_column_needs_a_source() -> None:
    with pytest.raises(ConfigError, match="'obs', which is missing"):
        SampleBatch({"r": np.zeros(1)}, NextObs(np.array([0]), np.zeros(1)))
    batch = SampleBatch({"r": np.zeros(1)}, NextObs(np.array([2]), np.zeros(0), np.array([5.0, 6.0, 7.0])))
    assert batch["next_obs"].tolist() == [7.0]


def test_next_obs_is_derived_and_a_stored_column_wins() -> None:
    batch, naive = lanes([3, 2])
    assert "next_obs" in batch
    assert "next_obs" not in batch.keys()  # noqa: SIM118
    first = batch["next_obs"]
    np.testing.assert_array_equal(first, naive)
    first[:] = -1
    np.testing.assert_array_equal(batch["next_obs"], naive)
    batch["next_obs"] = naive + 0.25
    assert "next_obs" in list(batch)
    np.testing.assert_array_equal(batch["next_obs"], naive + 0.25)
    np.testing.assert_array_equal(SampleBatch.concat([batch, batch])["next_obs"], np.tile(naive + 0.25, (2, 1)))


def test_next_obs_of_tree_observations() -> None:
    obs = {"p": np.arange(3), "q": (np.arange(6.0).reshape(3, 2),)}
    extra = {"p": np.array([10, 20]), "q": (np.array([[0.1, 0.2], [0.3, 0.4]]),)}
    nxt = SampleBatch({"obs": obs}, NextObs(np.array([1, -2, -1]), extra))["next_obs"]
    assert nxt["p"].tolist() == [1, 20, 10]
    assert nxt["q"][0].tolist() == [[2.0, 3.0], [0.3, 0.4], [0.1, 0.2]]


def test_replacing_obs_keeps_the_old_observations_as_the_source_of_next_obs() -> None:
    batch, naive = lanes([3])
    batch["obs"] = batch["obs"] * 0 - 5
    np.testing.assert_array_equal(batch["next_obs"], naive)
    with pytest.raises(ConfigError, match="next observations in another batch"):
        batch.bootstrap(np.zeros(3), np.zeros(1))


@given(batches)
def test_bootstrap_gives_the_value_of_each_next_observation(made: tuple[SampleBatch, np.ndarray]) -> None:
    batch, naive = made
    extra = batch.next_obs_source.extra
    got = batch.bootstrap(batch["obs"][:, 0] * 2 + 1, extra[:, 0] * 2 + 1)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, naive[:, 0] * 2 + 1)


def test_bootstrap_refuses_what_it_cannot_answer() -> None:
    batch, naive = lanes([3, 2])
    with pytest.raises(ConfigError, match="4 values and 2 extra_values for 5 rows and 2 extra"):
        batch.bootstrap(np.zeros(4), np.zeros(2))
    with pytest.raises(ConfigError, match="5 values and 1 extra_values"):
        batch.bootstrap(np.zeros(5), np.zeros(1))
    with pytest.raises(ConfigError, match="next observations in another batch"):
        batch.slice(0, 2).bootstrap(np.zeros(2), np.zeros(2))
    with pytest.raises(ConfigError, match="no derived next_obs"):
        SampleBatch({"obs": naive}).bootstrap(np.zeros(5), np.zeros(0))
    whole = batch.slice(3, 5)  # all of lane 1: it has its next observations itself
    assert whole.bootstrap(np.array([1.0, 2.0]), np.array([8.0, 9.0])).tolist() == [2.0, 9.0]


def test_a_slice_is_a_view_that_knows_the_observation_after_its_end() -> None:
    batch, naive = lanes([4, 3])
    part = batch.slice(1, 3)
    assert np.shares_memory(part["obs"], batch["obs"])
    assert np.shares_memory(part["actions"]["b"][0], batch["actions"]["b"][0])
    assert part.next_obs_source.source is batch["obs"]
    np.testing.assert_array_equal(part["next_obs"], naive[1:3])
    np.testing.assert_array_equal(part.slice(1, 2)["next_obs"], naive[2:3])
    np.testing.assert_array_equal(batch.slice(-2, 99)["obs"], batch["obs"][-2:])
    assert len(batch.slice(5, 2)) == 0
    assert part.fragment_lengths is None
    assert batch.slice(0, 7).fragment_lengths.tolist() == [4, 3]


@given(batches, st.lists(st.integers(0, 30), max_size=5))
def test_concat_of_slices_is_the_original(made: tuple[SampleBatch, np.ndarray], points: list[int]) -> None:
    batch, naive = made
    parts = [batch.slice(a, b) for a, b in cut(len(batch), points)]
    for (a, b), part in zip(cut(len(batch), points), parts, strict=True):
        np.testing.assert_array_equal(part["next_obs"], naive[a:b])
        np.testing.assert_array_equal(part.slice(1, 3)["next_obs"], naive[a:b][1:3])
    whole = SampleBatch.concat(parts)
    np.testing.assert_array_equal(whole["next_obs"], naive)
    stored = {name: whole[name] for name in batch}
    assert_same(SampleBatch(stored), SampleBatch(dict(batch.items())))


@given(batches, batches)
def test_concat_of_roots_copies_no_observation_into_next_obs(
    one: tuple[SampleBatch, np.ndarray], two: tuple[SampleBatch, np.ndarray]
) -> None:
    both = SampleBatch.concat([one[0], two[0], one[0]])
    assert "next_obs" not in list(both)
    assert both.next_obs_source.source is None
    naive = np.concatenate([one[1], two[1], one[1]])
    np.testing.assert_array_equal(both["next_obs"], naive)
    np.testing.assert_array_equal(
        both.bootstrap(both["obs"][:, 0], both.next_obs_source.extra[:, 0]), naive[:, 0].astype(np.float32)
    )
    lengths = [b.fragment_lengths.tolist() for b in (one[0], two[0], one[0])]
    assert both.fragment_lengths.tolist() == [n for part in lengths for n in part]
    assert not np.shares_memory(both["obs"], one[0]["obs"])


def test_concat_keeps_one_source_for_selections_of_one_batch() -> None:
    batch, naive = lanes([4, 3])
    parts = [batch.select(np.array([5, 0])), batch.select(np.array([2]))]
    both = SampleBatch.concat(parts)
    assert both.next_obs_source.source is batch["obs"]
    np.testing.assert_array_equal(both["next_obs"], naive[[5, 0, 2]])


def test_concat_stores_next_obs_where_the_sources_differ_and_drops_it_where_one_has_none() -> None:
    (a, naive_a), (b, naive_b) = lanes([4]), lanes([3, 2])
    mixed = SampleBatch.concat([a.slice(0, 2), b])
    assert "next_obs" in list(mixed)
    assert mixed.fragment_lengths is None
    np.testing.assert_array_equal(mixed["next_obs"], np.concatenate([naive_a[:2], naive_b]))
    bare = SampleBatch(dict(b.items()))
    assert "next_obs" not in SampleBatch.concat([a, bare])
    stored = SampleBatch({**dict(b.items()), "next_obs": naive_b})
    np.testing.assert_array_equal(SampleBatch.concat([a, stored])["next_obs"], np.concatenate([naive_a, naive_b]))


def test_concat_names_what_differs() -> None:
    one = SampleBatch({"obs": np.zeros(1), "x": np.zeros(1)})
    two = SampleBatch({"obs": np.zeros(1), "y": np.zeros(1)})
    with pytest.raises(ConfigError, match="batches 0 and 2 differ in the columns x, y"):
        SampleBatch.concat([one, one, two])
    with pytest.raises(ConfigError, match="no batches"):
        SampleBatch.concat([])


@given(batches, st.integers(0, 99))
def test_shuffle_moves_all_columns_alike(made: tuple[SampleBatch, np.ndarray], seed: int) -> None:
    batch, naive = made
    state = np.random.get_state()[1].copy()
    mixed = batch.shuffle(np.random.default_rng(seed))
    order = np.random.default_rng(seed).permutation(len(batch))
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    for name in batch:
        for x, y in zip(tree.leaves(mixed[name]), tree.leaves(batch[name]), strict=True):
            np.testing.assert_array_equal(x, y[order])
            assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(mixed["next_obs"], naive[order])
    assert mixed.fragment_lengths is None


def test_select_takes_index_arrays_masks_and_columns() -> None:
    batch, naive = lanes([3, 2])
    mask = np.array([True, False, False, True, True])
    assert batch.select(mask)["rewards"].tolist() == [0, 30, 40]
    assert batch.select(np.array([4, 4, -5]))["rewards"].tolist() == [40, 40, 0]
    assert len(batch.select([])) == 0
    few = batch.select(np.array([4, 1]), columns=["next_obs", "actions"])
    assert list(few) == ["next_obs", "actions"]
    np.testing.assert_array_equal(few["next_obs"], naive[[4, 1]])
    assert few["actions"]["a"].tolist() == [11, 8]
    with pytest.raises(KeyError, match="unknown column 'nope'"):
        batch.select(np.array([0]), columns=["nope"])


@given(batches, st.integers(1, 12), st.booleans(), st.booleans())
def test_minibatches_hold_every_row_once(
    made: tuple[SampleBatch, np.ndarray], size: int, drop_last: bool, ordered: bool
) -> None:
    batch, naive = made
    n = len(batch)
    rng = None if ordered else np.random.default_rng(3)
    parts = list(batch.minibatches(size, rng, drop_last, columns=["rewards", "obs", "next_obs"]))
    rows = np.concatenate([p["rewards"] for p in parts]).astype(int) // 10
    sizes = [len(p) for p in parts]
    if size >= n:
        assert sizes == [n]
    elif drop_last:
        assert sizes == [size] * (n // size)
    else:
        assert sizes == [size] * (n // size) + ([n % size] if n % size else [])
    assert len(set(rows.tolist())) == len(rows) == sum(sizes)
    if ordered:
        assert rows.tolist() == list(range(len(rows)))
    np.testing.assert_array_equal(np.concatenate([p["obs"] for p in parts]), batch["obs"][rows])
    np.testing.assert_array_equal(np.concatenate([p["next_obs"] for p in parts]), naive[rows])
    assert all(list(p) == ["rewards", "obs", "next_obs"] for p in parts)


def test_minibatches_of_all_columns_keep_next_obs_derived() -> None:
    batch, naive = lanes([3, 2])
    rng = np.random.default_rng(0)
    for part in batch.minibatches(2, rng):
        assert list(part) == list(batch)
        np.testing.assert_array_equal(part["next_obs"], naive[part["rewards"].astype(int) // 10])
    assert np.shares_memory(next(batch.minibatches(2))["obs"], batch["obs"])
    assert list(SampleBatch({"obs": np.zeros(0)}).minibatches(4, rng)) == []
    with pytest.raises(ConfigError, match="size 0"):
        batch.minibatches(0)


def test_minibatches_field_case_25() -> None:
    batch = SampleBatch({"id": np.arange(100), "obs": np.arange(100.0)})
    rng = np.random.default_rng(1)
    for size, drop_last, seen in [(32, False, 100), (32, True, 96), (256, True, 100)]:
        parts = list(batch.minibatches(size, rng, drop_last))
        ids = np.concatenate([p["id"] for p in parts])
        assert len(ids) == len(set(ids.tolist())) == seen
        np.testing.assert_array_equal(np.concatenate([p["obs"] for p in parts]), ids.astype(float))


def test_split_by_episode_cuts_at_episodes_fragments_envs_and_agents() -> None:
    batch = SampleBatch(
        {
            "obs": np.arange(8),
            "eps_id": np.array([7, 7, 7, 7, 9, 9, 9, 9]),
            "fragment_id": np.array([0, 0, 1, 1, 1, 1, 1, 1]),
            "agent_id": np.array([0, 0, 0, 0, 0, 1, 1, 1]),
            "env_id": np.array([0, 0, 0, 0, 0, 0, 0, 2]),
        }
    )
    parts = batch.split_by_episode()
    assert [p["obs"].tolist() for p in parts] == [[0, 1], [2, 3], [4], [5, 6], [7]]
    assert all(np.shares_memory(p["obs"], batch["obs"]) for p in parts)
    assert batch.slice(0, 0).split_by_episode() == []
    with pytest.raises(ConfigError, match="'eps_id'; this batch has obs"):
        SampleBatch({"obs": np.zeros(1)}).split_by_episode()


@pytest.mark.parametrize(
    ("t", "fragment"), [([0, 1, 4, 5], [0, 0, 2, 2]), ([0, 1, 2, 3], [0, 0, 1, 1]), ([0, 1, 4, 5], None)]
)
def test_sequences_field_case_14(t: list[int], fragment: list[int] | None) -> None:
    columns = {"eps_id": np.array([7, 7, 7, 7]), "t": np.array(t)}
    if fragment is not None:
        columns["fragment_id"] = np.array(fragment)
    parts = SampleBatch(columns)
    got = SampleBatch.concat([parts.slice(0, 2), parts.slice(2, 4)]).sequences(4)
    assert got.lengths.tolist() == [2, 2]
    assert got.starts.tolist() == [0, 2]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=25), st.integers(1, 5))
def test_sequences_against_a_row_by_row_reference(ids: list[tuple[int, int]], max_len: int) -> None:
    eps = np.array([a for a, _ in ids], np.int64)
    agents = np.array([b for _, b in ids], np.int64)
    starts: list[int] = []
    for row in range(len(ids)):
        if row == 0 or ids[row] != ids[row - 1] or row - starts[-1] == max_len:
            starts.append(row)
    got = SampleBatch({"eps_id": eps, "agent_id": agents}).sequences(max_len)
    assert got.starts.tolist() == starts
    assert got.lengths.tolist() == np.diff([*starts, len(ids)]).tolist() if ids else got.lengths.tolist() == []


def test_sequences_refuses_a_length_below_one() -> None:
    with pytest.raises(ConfigError, match="max_len 0"):
        SampleBatch({"eps_id": np.zeros(2)}).sequences(0)


def test_time_major_is_a_view_of_equal_fragments() -> None:
    batch, naive = lanes([3, 3])
    columns = batch.time_major()
    assert list(columns) == list(batch)
    assert columns["rewards"].tolist() == [[0, 30], [10, 40], [20, 50]]
    assert columns["actions"]["b"][0].shape == (3, 2, 2)
    for name in batch:
        for x, y in zip(tree.leaves(columns[name]), tree.leaves(batch[name]), strict=True):
            assert np.shares_memory(x, y)
    np.testing.assert_array_equal(batch.time_major(3, columns=["next_obs"])["next_obs"][:, 1], naive[3:])
    padded = batch.time_major(pad=True)
    assert padded["mask"].tolist() == [[True, True]] * 3
    assert np.shares_memory(padded["rewards"], batch["rewards"])


def test_time_major_pads_on_request_only() -> None:
    batch, _ = lanes([3, 1, 2])
    with pytest.raises(ConfigError, match="length 1, 2, 3 do not all have T=3 rows; use pad=True"):
        batch.time_major()
    columns = batch.time_major(pad=True)
    assert columns["rewards"].tolist() == [[0, 30, 40], [10, 0, 50], [20, 0, 0]]
    assert columns["rewards"].dtype == np.float32
    assert columns["mask"].tolist() == [[True, True, True], [True, False, True], [True, False, False]]
    assert columns["actions"]["b"][0][1].tolist() == [[2, 3], [0, 0], [10, 11]]
    assert batch.time_major(4, pad=True)["mask"].sum(axis=0).tolist() == [3, 1, 2]
    with pytest.raises(ConfigError, match="use T >= 3"):
        batch.time_major(2, pad=True)
    with pytest.raises(ConfigError, match="time_major needs fragment_lengths"):
        batch.shuffle(np.random.default_rng(0)).time_major()


def test_time_major_does_not_overwrite_a_mask_of_the_batch() -> None:
    batch = SampleBatch({"mask": np.arange(3)}, fragment_lengths=np.array([2, 1]))
    with pytest.raises(ConfigError, match="column 'mask' of its own"):
        batch.time_major(pad=True)


@pytest.mark.parametrize("lengths", [[2, 2], [4, -1], [[3]]])
def test_fragment_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ConfigError, match="do not add up to 3 rows"):
        SampleBatch({"obs": np.zeros(3)}, fragment_lengths=np.array(lengths))


def test_torch_tensors_share_memory() -> None:
    batch, naive = lanes([3, 2])
    tensors = batch.to_torch()
    batch["rewards"][1] = 77
    batch["actions"]["b"][0][0, 1] = 99
    assert tensors["rewards"].tolist() == [0, 77, 20, 30, 40]
    assert tensors["actions"]["b"][0][0, 1].item() == 99
    assert list(batch.to_torch(["next_obs", "obs"])) == ["next_obs", "obs"]
    assert batch.to_torch(["next_obs"])["next_obs"].tolist() == naive.tolist()


def test_torch_copies_what_it_cannot_share_without_a_warning() -> None:
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    batch = SampleBatch({"fixed": fixed, "back": np.arange(3)[::-1], "big": np.arange(3, dtype=">i4")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = batch.to_torch()
    assert {k: v.tolist() for k, v in tensors.items()} == {"fixed": [0, 1, 2], "back": [2, 1, 0], "big": [0, 1, 2]}
    tensors["fixed"][0] = 9
    assert fixed[0] == 0
    with pytest.raises(ConfigError, match="no dtype for <U1"):
        SampleBatch({"name": np.array(["a"])}).to_torch()


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_a_copy_of_a_slice_leaves_the_parent_behind(how: str) -> None:
    def clone(batch: SampleBatch) -> SampleBatch:
        return batch.copy() if how == "copy" else pickle.loads(pickle.dumps(batch))

    batch, naive = lanes([600, 400], episode_ends={100, 500})
    whole, part, inside = clone(batch), clone(batch.slice(98, 102)), clone(batch.slice(101, 501))
    assert_same(whole, batch)
    assert whole.fragment_lengths.tolist() == [600, 400]
    for got, rows in [(whole, slice(None)), (part, slice(98, 102)), (inside, slice(101, 501))]:
        np.testing.assert_array_equal(got["next_obs"], naive[rows])
        np.testing.assert_array_equal(got["obs"], batch["obs"][rows])
        assert got.next_obs_source.source is None
        assert not np.shares_memory(got["obs"], batch["obs"])
        assert not np.shares_memory(got.next_obs_source.index, batch.next_obs_source.index)
    assert len(part.next_obs_source.extra) == 4
    assert len(inside.next_obs_source.extra) == 1  # the ends of other fragments stayed behind
    assert len(pickle.dumps(batch.slice(98, 102))) < 1500
