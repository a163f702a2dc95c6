"""Parts for devices are disjoint, together everything, and equal where they must be (field case 25)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.optimizers.shards import fragment_minibatches, row_minibatches, split_fragments, split_rows

from .conftest import make_batch

fragment_lists = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5)


def batches_of(lists):
    batches, first = [], 0
    for lengths in lists:
        batches.append(make_batch(first, lengths))
        first += sum(lengths)
    return batches, first


def ids_of(part):
    return [int(i) for batch in part for i in batch["id"]]


@settings(deadline=None)
@given(fragment_lists, st.integers(1, 4))
def test_row_parts_are_equal_and_disjoint(lists, num_parts):
    batches, total = batches_of(lists)
    if total < num_parts:
        with pytest.raises(ConfigError, match=f"{total} rows"):
            split_rows(batches, num_parts)
        return
    parts, dropped = split_rows(batches, num_parts)
    assert dropped == total % num_parts
    assert {len(ids_of(part)) for part in parts} == {total // num_parts}
    assert [i for part in parts for i in ids_of(part)] == list(range(total - dropped))
    for batch in (batch for part in parts for batch in part):
        np.testing.assert_array_equal(batch["obs"][:, 0], batch["id"])
        np.testing.assert_array_equal(batch["rewards"], batch["id"] / 8)


@settings(deadline=None)
@given(fragment_lists, st.integers(1, 4))
def test_fragment_parts_cut_no_fragment_and_lose_none(lists, num_parts):
    batches, total = batches_of(lists)
    lengths = [n for fragments in lists for n in fragments if n]
    if len(lengths) < num_parts:
        with pytest.raises(ConfigError, match="fragments cannot be divided"):
            split_fragments(batches, num_parts)
        return
    parts = split_fragments(batches, num_parts)
    assert len(parts) == num_parts
    assert all(ids_of(part) for part in parts)
    assert [i for part in parts for i in ids_of(part)] == list(range(total))
    assert [n for part in parts for batch in part for n in batch.fragment_lengths] == lengths
    whole = {int(i): nxt for batch in batches for i, nxt in zip(batch["id"], batch["next_obs"], strict=True)}
    for batch in (batch for part in parts for batch in part):
        np.testing.assert_array_equal(batch["next_obs"], [whole[int(i)] for i in batch["id"]])


def test_equal_fragments_are_divided_equally():
    parts = split_fragments([make_batch(0, [5] * 6), make_batch(30, [5] * 6)], 3)
    assert [len(ids_of(part)) for part in parts] == [20, 20, 20]


def test_rows_of_a_pass_case_25():
    """100 rows: minibatches of 32 on one device, then on three (30 each), then one larger than the batch."""
    rng = np.random.default_rng(0)
    one = row_minibatches(100, 1, 32, rng)
    assert [len(parts[0]) for parts in one] == [32, 32, 32, 4]
    assert sorted(np.concatenate([parts[0] for parts in one]).tolist()) == list(range(100))
    three = row_minibatches(33, 3, 32, rng)
    assert [[len(part) for part in parts] for parts in three] == [[10] * 3, [10] * 3, [10] * 3, [3] * 3]
    for device in range(3):
        seen = np.concatenate([parts[device] for parts in three])
        assert sorted(seen.tolist()) == list(range(33))
    assert [len(parts[0]) for parts in row_minibatches(100, 1, 256, rng)] == [100]
    with pytest.raises(ConfigError, match="minibatch_size 2"):
        row_minibatches(10, 3, 2, rng)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=3), st.integers(1, 40))
def test_fragments_of_a_pass(parts, size):
    fragments = [np.stack([np.cumsum(n) - n, n], 1) for n in map(np.array, parts)]
    minibatches = fragment_minibatches(fragments, size, np.random.default_rng(1))
    assert 1 <= len(minibatches) <= min(len(part) for part in parts)
    for device, lengths in enumerate(parts):
        chosen = [minibatch[device] for minibatch in minibatches]
        assert all(len(c) for c in chosen)
        assert sorted(np.concatenate(chosen).tolist()) == list(range(len(lengths)))
