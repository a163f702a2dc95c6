"""Spaces as columns: what is refused, what the columns look like, what each env is handed."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.env.spaces import (
    ActionCodec,
    LeafSpec,
    ObsWriter,
    check_action_space,
    check_finite,
    check_observation_space,
    clip_to_space,
    coerce_reward,
    empty_columns,
    leaf_spec,
    nonfinite_rows,
    object_column,
    unsquash,
    zeros_columns,
)
from rlsample.errors import EnvFailedError, SpaceError
from rlsample.tree import flatten, leaves, map_tree

NESTED = spaces.Dict(
    {
        "img": spaces.Box(0, 255, (4, 4), np.uint8),
        "n": spaces.Discrete(5),
        "pair": spaces.Tuple((spaces.Box(0, 1, (2,), np.float32), spaces.MultiBinary(3))),
        "pos": spaces.Box(-1, 1, (), np.float64),
    }
)
ALL = [
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(-1, 1, (1,), np.float32),
    spaces.Box(-2, 5, (2, 3), np.float64),
    spaces.Box(0, 255, (4, 4, 1), np.uint8),
    spaces.Box(-9, 9, (2,), np.int16),
    spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32)),
    spaces.Discrete(3, start=5),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, 3]])),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 2)),
    NESTED,
    spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32))),
]
names = lambda s: f"{type(s).__name__}{s.shape}"  # noqa: E731


def seeded(space, seed=0):
    space.seed(seed)
    return space


def stacked(space, k):
    columns = zeros_columns(space, (k,))
    writer = ObsWriter(space)
    samples = [space.sample() for _ in range(k)]
    for row, sample in enumerate(samples):
        writer.write(columns, row, sample, row, 0)
    return columns, samples


# Which spaces are allowed


@pytest.mark.parametrize("space", ALL, ids=names)
def test_spaces_of_fixed_size_are_allowed(space):
    check_observation_space(space)
    check_action_space(space)


@pytest.mark.parametrize(
    "bad",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2)),
        spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
        "no space",
    ],
    ids=lambda s: type(s).__name__,
)
def test_spaces_of_no_fixed_size_are_refused_with_path_and_wrapper(bad):
    space = bad if bad == "no space" else spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), bad))})
    with pytest.raises(SpaceError) as e:
        check_observation_space(space)
    assert "TransformObservation" in str(e.value)
    assert bad == "no space" or "observation space at a[1] is" in str(e.value)
    assert type(bad).__name__ in str(e.value) or bad == "no space"
    with pytest.raises(SpaceError, match="TransformAction"):
        check_action_space(space)


def test_an_empty_dict_or_tuple_has_no_columns():
    for any_size in (False, True):
        with pytest.raises(SpaceError, match="at x is an empty Tuple"):
            check_observation_space(spaces.Dict({"x": spaces.Tuple(())}), any_size)


def test_any_size_allows_every_space_and_nothing_else():
    for space in (spaces.Text(5), spaces.Dict({"a": spaces.Tuple((spaces.Sequence(spaces.Discrete(2)),))})):
        check_observation_space(space, any_size=True)
        check_action_space(space, any_size=True)
    with pytest.raises(SpaceError, match="is unknown"):
        check_action_space("no space", any_size=True)


def test_leaves_without_a_fixed_size_are_objects():
    space = spaces.Dict({"n": spaces.Discrete(5), "pair": spaces.Tuple((spaces.Text(3), NESTED["pos"]))})
    columns = empty_columns(space, (2,))
    writer = ObsWriter(space, any_size=True)
    assert (writer.shape, writer.dtype) == (None, None)
    assert ObsWriter(spaces.Text(3), any_size=True).shape is None
    for row, word in enumerate(("ab", "c")):
        writer.write(columns, row, {"n": row, "pair": (word, 0.5)}, 0, None)
    assert columns["pair"][0].tolist() == ["ab", "c"]
    assert {p: leaf.dtype.kind for p, leaf in flatten(columns)} == {"n": "i", "pair[0]": "O", "pair[1]": "f"}
    with pytest.raises(EnvFailedError, match=r"slot 6, episode step 4: observation at pair\[0\] is 'abcd' \(str\)"):
        writer.write(columns, 0, {"n": 0, "pair": ("abcd", 0.5)}, 6, 4)


def test_nonfinite_numbers_are_found_inside_objects():
    good = {"a": [1.0, (np.zeros(2), 3, "nan")], "b": np.array([1, 2])}
    column = object_column([good, [np.array([0.0, -np.inf])], None, (np.float32("nan"),)])
    found = nonfinite_rows({"x": column})
    assert [(row, path) for row, path, _ in found] == [(1, "x"), (3, "x")]
    assert found[0][2] == -np.inf
    assert nonfinite_rows(column[:1]) == []


def test_object_columns_keep_tuples_and_arrays_as_they_are():
    values = [(1, 2), np.zeros(3), np.array(4), "ab", None]
    column = object_column(values)
    assert column.shape == (5,)
    assert all(a is b for a, b in zip(column, values, strict=True))


# Columns


def test_leaf_spec_keeps_structure_shape_and_dtype():
    assert leaf_spec(NESTED) == {
        "img": LeafSpec((4, 4), np.dtype(np.uint8)),
        "n": LeafSpec((), np.dtype(np.int64)),
        "pair": (LeafSpec((2,), np.dtype(np.float32)), LeafSpec((3,), np.dtype(np.int8))),
        "pos": LeafSpec((), np.dtype(np.float64)),
    }


def test_columns_have_leading_dims_and_no_up_cast():
    for new in (empty_columns, zeros_columns):
        got = {p: (leaf.shape, leaf.dtype.name) for p, leaf in flatten(new(NESTED, (2, 7)))}
        assert got == {
            "img": ((2, 7, 4, 4), "uint8"),
            "n": ((2, 7), "int64"),
            "pair[0]": ((2, 7, 2), "float32"),
            "pair[1]": ((2, 7, 3), "int8"),
            "pos": ((2, 7), "float64"),
        }
    assert all(not leaf.any() for leaf in leaves(zeros_columns(NESTED, (3,))))


# Actions


@pytest.mark.parametrize("space", ALL, ids=names)
@pytest.mark.parametrize("k", [1, 3, 70])
def test_env_gets_what_its_space_contains_and_the_values_it_was_sent(space, k):
    columns, samples = stacked(seeded(space), k)
    rows = ActionCodec(space).check_and_split(columns, np.arange(k))
    assert len(rows) == k
    for row, sample in zip(rows, samples, strict=True):
        assert space.contains(row)
        a, b = dict(_walk(row)), dict(_walk(sample))
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[p], b[p]) for p in a)
    again = ActionCodec(space).to_env(columns)
    assert all(
        np.array_equal(x, y) for r, s in zip(rows, again, strict=True) for x, y in zip(_vals(r), _vals(s), strict=True)
    )


def _walk(value, path=""):
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _walk(v, f"{path}.{k}")
    elif isinstance(value, tuple):
        for i, v in enumerate(value):
            yield from _walk(v, f"{path}[{i}]")
    else:
        yield path, value


def _vals(value):
    return [v for _, v in _walk(value)]


def test_exact_forms():
    assert [type(a) for a in ActionCodec(spaces.Discrete(3, start=5)).to_env(np.array([5, 6, 7]))] == [int] * 3
    (scalar,) = ActionCodec(spaces.Box(-1, 1, (), np.float32)).to_env(np.array([0.5], np.float32))
    assert type(scalar) is np.ndarray
    assert (scalar.shape, scalar.dtype, scalar.item()) == ((), np.float32, 0.5)
    (pair,) = ActionCodec(ALL[-1]).to_env((np.array([1]), np.array([[0.5, -0.5]], np.float64)))
    assert type(pair) is tuple
    assert type(pair[0]) is int
    assert pair[1].dtype == np.float32
    (multi,) = ActionCodec(spaces.MultiDiscrete([2, 3])).to_env(np.array([[1, 2]], np.int32))
    assert (multi.shape, multi.dtype) == ((2,), np.int64)


@pytest.mark.parametrize("space", ALL, ids=names)
def test_rows_share_no_memory_with_the_batch(space):
    columns, _ = stacked(seeded(space), 3)
    for split in (ActionCodec(space).to_env, lambda c: ActionCodec(space).check_and_split(c, [0, 1, 2])):
        arrays = [v for row in split(columns) for v in _vals(row) if isinstance(v, np.ndarray)]
        assert not any(np.shares_memory(v, leaf) for v in arrays for leaf in leaves(columns))
    copy = ActionCodec(space).checked_copy(columns, [0, 1, 2])
    assert not any(np.shares_memory(a, b) for a, b in zip(leaves(copy), leaves(columns), strict=True))
    assert [a.dtype for a in leaves(copy)] == [a.dtype for a in leaves(columns)]


BAD_ACTIONS = [
    (spaces.Discrete(3, start=5), np.array([5, 8]), "slot 9 was given 8"),
    (spaces.Discrete(3, start=5), np.array([5, 4]), "slot 9 was given 4"),
    (spaces.Discrete(3), np.array([0, 3], np.uint8), "slot 9 was given 3"),
    (spaces.Discrete(3), np.array([0.0, 1.0]), "dtype float64"),
    (spaces.Discrete(3), np.array([True, False]), "dtype bool"),
    (spaces.Discrete(3), np.array([[0], [1]]), r"expected shape \(2,\), got \(2, 1\)"),
    (spaces.Discrete(3), np.array([0]), r"expected shape \(2,\), got \(1,\)"),
    (spaces.Discrete(3), {"a": np.array([0, 1])}, "array"),
    (spaces.Discrete(3), [[0, 1], [1]], "array"),
    (spaces.MultiDiscrete([2, 3]), np.array([[0, 2], [2, 0]]), r"slot 9 was given \[2, 0\]"),
    (spaces.MultiDiscrete([2, 3], start=[1, 1]), np.array([[1, 1], [0, 1]]), r"slot 9 was given \[0, 1\]"),
    (spaces.MultiBinary(2), np.array([[0, 1], [2, 1]]), r"slot 9 was given \[2, 1\]"),
    (spaces.Box(-1, 1, (1,)), np.array([[0.0], [1.5]]), r"slot 9 was given \[1.5\]"),
    (spaces.Box(-1, 1, (1,)), np.array([[0.0], [np.nan]], np.float32), r"slot 9 was given \[nan\]"),
    (spaces.Box(-1, 1, (40,)), np.array([[0.0] * 40, [0.5] * 39 + [np.nan]]), "slot 9 was given"),
    (ALL[5], np.array([[0, 0], [0, np.inf]], np.float32), r"slot 9 was given \[0.0, inf\]"),
    (ALL[5], np.array([[0, 0], [0, 1e200]]), r"slot 9 was given \[0.0, 1e\+200\]"),
    (spaces.Box(0, 255, (1,), np.uint8), np.array([[3], [256]]), r"slot 9 was given \[256\]"),
    (spaces.Box(0, 255, (1,), np.uint8), np.array([[3], [-1]]), r"slot 9 was given \[-1\]"),
    (spaces.Box(0, 255, (1,), np.uint8), np.array([[3.0], [4.0]]), "dtype float64"),
    (ALL[-1], (np.array([0, 1]),), "tuple of 2 columns, got tuple of 1"),
    (ALL[-1], np.array([0, 1]), "tuple of 2 columns, got ndarray"),
    (ALL[-1], (np.array([0, 2]), np.zeros((2, 2))), r"actions at \[0\]: slot 9 was given 2"),
    (spaces.Dict({"a": spaces.Discrete(2)}), {"b": np.array([0, 1])}, r"keys \['a'\], got \['b'\]"),
    (spaces.Dict({"a": spaces.Discrete(2)}), {"a": np.array([0, 7])}, "actions at a: slot 9 was given 7"),
]


@pytest.mark.parametrize(("space", "actions", "message"), BAD_ACTIONS)
def test_a_bad_action_is_named_with_its_slot(space, actions, message):
    codec = ActionCodec(space)
    for call in (codec.check, codec.check_and_split, codec.checked_copy):
        with pytest.raises(SpaceError, match=message):
            call(actions, np.array([4, 9]))


def test_a_float64_action_just_over_a_float32_bound_is_rounded_into_it():
    (row,) = ActionCodec(spaces.Box(-1, 1, (1,))).check_and_split(np.array([[1.0 + 1e-12]]), [0])
    assert row.tolist() == [1.0]


def test_huge_finite_actions_of_an_unbounded_box_are_actions():
    space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    (row,) = ActionCodec(space).check_and_split(np.full((1, 4), 1.5e308), [0])
    assert row.tolist() == [1.5e308] * 4


@given(st.integers(-5, 12), st.integers(-5, 5), st.integers(1, 6), st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_discrete_accepts_exactly_what_its_space_contains(value, start, n, k, where):
    space = spaces.Discrete(n, start=start)
    actions = np.full(k, start)
    actions[where % k] = value
    if space.contains(value):
        assert ActionCodec(space).check_and_split(actions, np.arange(k)) == actions.tolist()
    else:
        with pytest.raises(SpaceError, match=f"slot {where % k} was given {value},"):
            ActionCodec(space).check_and_split(actions, np.arange(k))


# Observations


@pytest.mark.parametrize("space", ALL, ids=names)
def test_observations_are_copied_into_their_row(space):
    columns, samples = stacked(seeded(space, 3), 4)
    for row, sample in enumerate(samples):
        got = dict(flatten(map_tree(lambda leaf, row=row: leaf[row], columns)))
        want = {p.lstrip("."): v for p, v in _walk(sample)}
        assert all(np.array_equal(got[p], want[p]) for p in want)


GOOD_OBS = [
    (spaces.Box(-1, 1, (2,), np.float32), np.array([0.25, 0.5], np.float64), [0.25, 0.5]),
    (spaces.Box(-1, 1, (2,), np.float32), [0, 1], [0, 1]),
    (spaces.Box(-9, 9, (2,), np.float32), np.array([3, 4], np.int8), [3, 4]),
    (spaces.Box(-1, 1, (), np.float32), 0.5, 0.5),
    (spaces.Box(-1, 1, (), np.float32), np.float32(0.5), 0.5),
    (spaces.Discrete(5), 3, 3),
    (spaces.Discrete(5), np.int32(3), 3),
    (spaces.Discrete(5), np.array(3, np.uint8), 3),
    (spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
    (spaces.MultiBinary(2), np.array([1, 0], np.int64), [1, 0]),
    (spaces.Box(0, 255, (2,), np.uint8), [3, 255], [3, 255]),
]


@pytest.mark.parametrize(("space", "obs", "want"), GOOD_OBS)
def test_observations_of_a_fitting_dtype_are_taken(space, obs, want):
    column = zeros_columns(space, (2,))
    ObsWriter(space).write(column, 1, obs, 0, 0)
    assert column[1].tolist() == want
    assert not column[0].any()
    assert column.dtype == space.dtype


BAD_OBS = [
    (
        spaces.Box(-1, 1, (2,)),
        np.zeros(3, np.float32),
        r"observation is shape \(3,\) of float32, expected shape",
    ),
    (spaces.Box(-1, 1, (2,)), np.zeros((1, 2), np.float32), r"shape \(1, 2\)"),
    (spaces.Box(-1, 1, (1,)), np.float32(0), r"shape \(\) of float32"),
    (spaces.Box(-1, 1, (2,)), np.zeros(2, np.int64), "of int64, expected .* of float32"),
    (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.float32), "of float32, expected .* of uint8"),
    (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.int64), "of int64, expected .* of uint8"),
    (spaces.Box(0, 255, (2,), np.uint8), [3, 256], "values up to 256"),
    (spaces.Box(-9, 9, (1,), np.int8), np.array([300]), "values up to 300"),
    (spaces.Discrete(5), 1.0, "of float64, expected .* of int64"),
    (spaces.Discrete(5), np.array([1]), r"shape \(1,\)"),
    (spaces.Box(-1, 1, (2,)), None, "NoneType"),
    (spaces.Box(-1, 1, (2,)), ({}, {}), "expected shape"),
    (spaces.Box(-1, 1, (2,)), "ab", "str"),
    (spaces.Box(-1, 1, (2,)), [[1.0], [1.0, 2.0]], "list"),
    (ALL[-1], (1,), "tuple of 1, expected a tuple of 2"),
    (ALL[-1], (1, np.zeros(3, np.float32)), r"observation at \[1\] is shape \(3,\)"),
    (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}, r"keys \['b'\], expected a dict with keys \['a'\]"),
    (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 1, "b": 1}, r"keys \['a', 'b'\]"),
    (spaces.Dict({"a": spaces.Discrete(2)}), 3, "int, expected a dict"),
]


@pytest.mark.parametrize(("space", "obs", "message"), BAD_OBS)
def test_a_bad_observation_names_slot_step_and_what_came(space, obs, message):
    with pytest.raises(EnvFailedError, match=f"slot 6, episode step 41: .*{message}") as e:
        ObsWriter(space).write(zeros_columns(space, (1,)), 0, obs, 6, 41)
    assert (e.value.slot, e.value.episode_step) == (6, 41)


def test_obs_writer_tells_what_may_be_inlined():
    plain, nested = ObsWriter(spaces.Box(-1, 1, (2, 3), np.float32)), ObsWriter(NESTED)
    assert (plain.shape, plain.dtype) == ((2, 3), np.float32)
    assert (nested.shape, nested.dtype) == (None, None)


def test_nonfinite_rows_are_found_once_each_and_overflow_is_no_fault():
    clean = np.full((3, 2), 3e38, np.float32)  # squares overflow float32
    assert nonfinite_rows(clean) == []
    assert nonfinite_rows(np.zeros((0, 2), np.float32)) == []
    assert nonfinite_rows(np.array([[255]], np.uint8)) == []
    bad = np.array([[0, 1], [np.nan, np.inf], [2, -np.inf]], np.float32)
    got = nonfinite_rows(bad)
    assert [(r, p) for r, p, _ in got] == [(1, ""), (2, "")]
    assert np.isnan(got[0][2])
    assert got[1][2] == -np.inf
    tree = {"n": np.arange(3), "x": (np.zeros((3, 2)), np.array([0, np.inf, 0]))}
    assert nonfinite_rows(tree) == [(1, "x[1]", np.inf)]
    assert nonfinite_rows(np.asfortranarray(bad)) == got or np.isnan(got[0][2])


def test_check_finite_names_slot_step_path_and_value():
    check_finite(np.zeros((2, 3)), [5, 6])
    with pytest.raises(EnvFailedError, match=r"slot 6, episode step 30: observation at x holds inf") as e:
        check_finite({"x": np.array([1.0, np.inf])}, np.array([5, 6]), np.array([20, 30]))
    assert (e.value.slot, e.value.episode_step) == (6, 30)


# Rewards


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float64(2), np.float32(2), np.int8(2), np.array(2), np.array([2.0], np.float32), np.array([2])],
    ids=repr,
)
def test_rewards_of_each_scalar_form_are_alike(value):
    got = coerce_reward(value, 0, 0)
    assert type(got) is float
    assert got == 2.0


def test_a_bool_reward_is_a_number():
    assert coerce_reward(True, 0, 0) == coerce_reward(np.bool_(True), 0, 0) == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([1.0, 2.0]), r"of shape \(2,\)"),
        (np.array([[1.0]]), r"of shape \(1, 1\)"),
        (np.array([]), r"of shape \(0,\)"),
        (np.array("a"), "dtype <U1"),
        (None, "reward None is NoneType"),
        ("1", "reward '1' is str"),
        ([1.0], "is list"),
        (1j, "is complex"),
        (np.complex64(1), "dtype complex64"),
        (float("nan"), "is nan"),
        (np.float32("inf"), "is inf"),
        (np.array([-np.inf]), "is -inf"),
    ],
)
def test_a_bad_reward_names_slot_step_and_value(value, message):
    with pytest.raises(EnvFailedError, match=f"slot 3, episode step 7: .*{message}") as e:
        coerce_reward(value, 3, 7)
    assert (e.value.slot, e.value.episode_step) == (3, 7)


def test_nonfinite_rewards_pass_when_allowed():
    assert coerce_reward(np.float32("inf"), 0, 0, allow_nonfinite=True) == np.inf
    assert np.isnan(coerce_reward(float("nan"), 0, 0, allow_nonfinite=True))


# Clipping and scaling


def test_clip_to_space_clips_boxes_only():
    space = spaces.Dict({"b": spaces.Box(np.float32([-1, 0]), np.float32([1, 2])), "d": spaces.Discrete(3)})
    given_actions = {"b": np.array([[-3.0, 5.0], [0.5, np.nan]]), "d": np.array([9, 1])}
    got = clip_to_space(space, given_actions)
    np.testing.assert_array_equal(got["b"], np.float32([[-1, 2], [0.5, np.nan]]))
    assert got["b"].dtype == np.float32
    assert got["d"] is given_actions["d"]
    assert given_actions["b"][0, 0] == -3.0


def test_unsquash_meets_the_bounds_exactly_and_leaves_unbounded_entries():
    space = spaces.Box(np.float32([-2, 0, -np.inf]), np.float32([6, 0.1, np.inf]))
    got = unsquash(space, np.array([[-1, -1, -1], [1, 1, 1], [0, 0, 7], [-3, 3, 9]], np.float32))
    tenth = float(np.float32(0.1))
    want = np.float32([[-2, 0, -1], [6, tenth, 1], [2, tenth / 2, 7], [-2, tenth, 9]])
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.float32
    nested = spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 10, (), np.float64)))
    d, b = unsquash(nested, (np.array([1]), np.array([0.5])))
    assert (d.tolist(), b.tolist()) == ([1], [7.5])


@given(st.floats(-1, 1), st.floats(-1e30, 1e30), st.floats(0, 1e30))
@settings(max_examples=200, deadline=None)
def test_unsquashed_actions_are_inside_the_space(unit, low, width):
    space = spaces.Box(np.float32(low), np.float32(low + width), (1,), np.float32)
    got = unsquash(space, np.array([[unit]]))
    assert space.low[0] <= got[0, 0] <= space.high[0]
