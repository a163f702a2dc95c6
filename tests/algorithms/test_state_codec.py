"""State survives JSON and npz with value, type, dtype and shape; nothing is pickled."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlsample.algorithms.state_codec import decode, encode
from rlsample.errors import CheckpointError


def round_trip(state):
    document, arrays = encode(state)
    text = json.dumps(document, allow_nan=False)
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        return decode(json.loads(text), {name: archive[name] for name in archive.files})


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        if a != a:  # a Python NaN comes back as NaN: its payload bits mean nothing to Python
            return b != b
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return a == b


dtypes = st.sampled_from(["f4", "f8", "f2", "i8", "u1", "u8", "?", "c8", "U3", "M8[ns]"]).map(np.dtype)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(),
    st.binary(),
    hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0)),
    st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.uint64(2**63 + 1)]),
)
states = st.recursive(
    leaves,
    lambda s: st.one_of(
        st.lists(s, max_size=3),
        st.lists(s, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.sampled_from(["$array", "$"])), s, max_size=3),
    ),
    max_leaves=12,
)


@given(states)
def test_any_state_comes_back_exactly(state):
    assert same(round_trip(state), state)


def test_a_generator_continues():
    rng = np.random.default_rng(5)
    rng.random(3)
    state = round_trip(rng.bit_generator.state)
    expected = rng.random(4)
    other = np.random.default_rng(6)
    other.bit_generator.state = state
    assert state["state"]["state"] > 2**64  # the integers of PCG64 have 128 bits
    assert np.array_equal(other.random(4), expected)


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"policy": {"net": [0, object()]}}, r"state\.policy\.net\[1\] is a object"),
        ({"a": np.array([None])}, r"state\.a is an array of Python objects"),
        ({"a": {1, 2}}, r"state\.a is a set"),
    ],
)
def test_what_cannot_be_stored_is_named(bad, where):
    with pytest.raises(CheckpointError, match=where):
        encode(bad)
