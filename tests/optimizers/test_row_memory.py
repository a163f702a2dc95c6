"""Rows in a slot are the batches' rows: all of them, in order, each column in its own dtype."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.optimizers.row_memory import HostRows, Memory, SharedMemory, loaded_rows, open_shared
from rlsample.sample_batch import SampleBatch

from .conftest import make_batch as batch_of

COLUMNS = ("obs", "actions", "rewards", "terminated", "id")


def filled(batches, columns=COLUMNS, whole_fragments=False, memory=None):
    rows = HostRows(columns, whole_fragments, memory or Memory())
    rows.fill(batches)
    return rows, loaded_rows(rows.memory.tensor, rows.layout)


def test_columns_are_joined_with_their_dtypes(make_batch):
    batches = [make_batch(0, [3]), make_batch(100, [2, 4]), make_batch(7, [])]
    _, rows = filled(batches)
    joined = SampleBatch.concat(batches)
    assert rows.count == joined.count == 9
    assert set(rows) == set(COLUMNS)
    for name in COLUMNS:
        np.testing.assert_array_equal(rows[name].numpy(), joined[name])
        assert rows[name].numpy().dtype == joined[name].dtype


def test_images_stay_uint8_and_trees_stay_trees():
    rng = np.random.default_rng(0)
    obs = {"image": rng.integers(0, 255, (5, 4, 4), np.uint8), "pair": (rng.normal(size=(5, 2)), np.arange(5) > 2)}
    rows, loaded = filled([SampleBatch({"obs": obs}), SampleBatch({"obs": obs})], ("obs",))
    assert loaded["obs"]["image"].dtype == torch.uint8
    np.testing.assert_array_equal(loaded["obs"]["image"][5:], obs["image"])
    np.testing.assert_array_equal(loaded["obs"]["pair"][0][:5], obs["pair"][0])
    np.testing.assert_array_equal(loaded["obs"]["pair"][1][5:], obs["pair"][1])
    assert rows.bytes_filled == rows.layout.num_bytes == 192 + 192 + 64  # each column once, on 64-byte boundaries


def test_each_row_finds_its_next_observation(make_batch):
    batches = [make_batch(1, [3, 1]), make_batch(50, [2])]
    _, rows = filled(batches, whole_fragments=True)
    wanted = np.concatenate([batch["next_obs"] for batch in batches])
    np.testing.assert_array_equal(rows.all_obs[rows.next_index], wanted)
    assert len(rows.all_obs) == 6 + 3
    assert len(rows["obs"]) == 6
    continues = rows.next_index[:-1] == torch.arange(1, 6)
    assert continues.tolist() == [True, True, False, False, True]


def test_slices_and_stored_next_observations_load_alike(make_batch):
    batch = make_batch(1, [3, 2, 4])
    stored = SampleBatch({**{name: batch[name] for name in batch}, "next_obs": batch["next_obs"]}, None, [3, 2, 4])
    for part in (stored, batch.select(np.arange(9)), batch.slice(3, 9)):
        _, rows = filled([part], whole_fragments=True)
        np.testing.assert_array_equal(rows.all_obs[rows.next_index], part["next_obs"])
    _, rows = filled([batch.slice(3, 9)], whole_fragments=True)
    assert len(rows.all_obs) == 6 + 2  # the extra observation of the rows left out stays behind


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_minibatch_of_fragments_is_those_fragments(lengths, random):
    memory, batch = Memory(), batch_of(1, lengths)
    host, _ = filled([batch], whole_fragments=True, memory=memory)
    chosen = [f for f in range(len(lengths)) if random.random() < 0.6] or [0]
    random.shuffle(chosen)
    rows = loaded_rows(memory.tensor, host.layout, host.minibatch(np.array(chosen)))
    starts = np.cumsum(lengths) - lengths
    wanted = np.concatenate([np.arange(starts[f], starts[f] + lengths[f]) for f in chosen])
    assert rows.count == len(wanted)
    for name in COLUMNS:
        np.testing.assert_array_equal(rows[name], batch[name][wanted])
    np.testing.assert_array_equal(rows.all_obs[rows.next_index], batch["next_obs"][wanted])
    same = np.diff(np.repeat(np.arange(len(chosen)), [lengths[f] for f in chosen])) == 0
    np.testing.assert_array_equal((rows.next_index[:-1] == torch.arange(1, rows.count)).numpy(), same)


def test_memory_is_used_again_and_grows(make_batch):
    memory = Memory()
    host, first = filled([make_batch(0, [8])], memory=memory)
    host.fill([make_batch(40, [8])])
    assert memory.version == 1
    np.testing.assert_array_equal(first["id"], np.arange(40, 48))  # the same place
    host.fill([make_batch(60, [80])])
    assert memory.version == 2
    np.testing.assert_array_equal(loaded_rows(memory.tensor, host.layout)["id"], np.arange(60, 140))


def test_shared_memory_is_seen_by_who_opens_it(make_batch):
    memory = SharedMemory()
    host, _ = filled([make_batch(3, [4])], memory=memory)
    theirs = loaded_rows(open_shared(memory.address), host.layout)
    np.testing.assert_array_equal(theirs["id"], [3, 4, 5, 6])
    host.fill([make_batch(9, [4])])
    np.testing.assert_array_equal(theirs["id"], [9, 10, 11, 12])
    memory.close()


@pytest.mark.parametrize(
    ("columns", "batches", "message"),
    [
        (("obs", "advantages"), [batch_of(0, [2])], "takes the column 'advantages'; the batch has obs"),
        (("obs",), [batch_of(0, [2]), batch_of(0, [2], dtype=np.float64)], "'obs' is float64.2. per row.*float32"),
        (("obs",), [], "no rows"),
        (("obs",), [batch_of(0, [])], "no rows"),
    ],
)
def test_what_cannot_be_loaded_is_named(columns, batches, message):
    with pytest.raises(ConfigError, match=message):
        filled(batches, columns)


def test_whole_fragments_need_next_observations():
    with pytest.raises(ConfigError, match="next observations"):
        filled([SampleBatch({"obs": np.zeros((2, 1))})], ("obs",), whole_fragments=True)
