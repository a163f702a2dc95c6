import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.policy.noise import BLOCK_ROWS, NoiseStream

KINDS = [("gumbel", 2), ("normal", 1), ("logistic", 3)]


def make(seed=3):
    return NoiseStream(KINDS, seed)


def test_a_call_for_many_rows_gives_what_calls_for_one_row_give():
    rows = BLOCK_ROWS + 700
    one_by_one = make()
    expected = np.concatenate([one_by_one.take(1) for _ in range(rows)])
    assert len(np.unique(expected, axis=0)) == rows
    for size in (7, 64, 1000):
        stream = make()
        got = np.concatenate([stream.take(size) for _ in range(rows // size)])
        np.testing.assert_array_equal(got, expected[: len(got)])


def test_more_rows_than_a_block_and_none_at_all():
    parts = make()
    first = [parts.take(n) for n in (BLOCK_ROWS, BLOCK_ROWS, 5)]
    whole = make()
    assert whole.take(0).shape == (0, 6)
    np.testing.assert_array_equal(whole.take(2 * BLOCK_ROWS + 5), np.concatenate(first))
    np.testing.assert_array_equal(whole.take(3), parts.take(3))


@settings(max_examples=20)
@given(st.integers(0, 3 * BLOCK_ROWS), st.integers(1, 2 * BLOCK_ROWS))
def test_a_restored_stream_continues_bit_for_bit(consumed, following):
    stream = make()
    stream.take(consumed)
    state = stream.get_state()
    expected = stream.take(following)
    other = make(seed=4)
    other.take(11)
    other.set_state(state)
    np.testing.assert_array_equal(other.take(following), expected)


def test_a_state_of_other_columns_is_refused_and_nothing_changes():
    stream, expected = make(), make().take(4)
    with pytest.raises(ConfigError, match="gumbel"):
        stream.set_state(NoiseStream([("gumbel", 2)], 0).get_state())
    np.testing.assert_array_equal(stream.take(4), expected)


def test_the_columns_have_the_moments_of_their_kinds():
    table = make().take(50 * BLOCK_ROWS)
    assert table.dtype == np.float32
    euler = 0.5772156649
    # Mean and standard deviation of the standard Gumbel, normal and logistic distributions.
    for column, mean, std in [
        (0, euler, np.pi / 6**0.5),
        (1, euler, np.pi / 6**0.5),
        (2, 0.0, 1.0),
        (3, 0.0, np.pi / 3**0.5),
        (5, 0.0, np.pi / 3**0.5),
    ]:
        assert abs(table[:, column].mean() - mean) < 0.02
        assert abs(table[:, column].std() - std) < 0.02
    assert abs(np.corrcoef(table[:, 0], table[:, 1])[0, 1]) < 0.01


def test_the_global_generator_is_untouched():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    make().take(BLOCK_ROWS + 1)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
