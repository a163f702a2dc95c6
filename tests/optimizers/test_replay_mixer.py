"""Replay by train batch: the proportion holds, no fragment is twice in a batch, and the past is really past."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.optimizers.replay_mixer import ReplayMixer
from rlsample.sample_batch import SampleBatch


def fragment(number, rows):
    return SampleBatch({"id": np.full(rows, number)})


def mixer(size, proportion=0.0, slots=0, seed=0):
    return ReplayMixer(size, proportion, slots, np.random.default_rng(seed))


def numbers(batch):
    return [int(part["id"][0]) for part in batch.fragments]


def test_without_replay_fragments_are_joined_in_order():
    mix = mixer(10)
    made = [mix.add(fragment(i, rows), i / 2, i) for i, rows in enumerate((4, 0, 5, 3, 20, 9, 1))]
    assert [None if b is None else numbers(b) for b in made] == [None, None, None, [0, 2, 3], [4], None, [5, 6]]
    assert [b.count for b in made if b] == [12, 20, 10]
    assert all(b.replayed_rows == 0 for b in made if b)
    assert made[3].versions == ((4, 0.0, 0), (5, 1.0, 2), (3, 1.5, 3))
    assert mix.num_stored_rows == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=30, max_size=60), st.sampled_from([0.3, 1.0, 2.5]), st.integers(1, 12))
def test_no_fragment_twice_and_fresh_ones_exactly_once(rows, proportion, slots):
    mix = mixer(20, proportion, slots)
    fresh_so_far = []
    for i, n in enumerate(rows):
        batch = mix.add(fragment(i, n), 0.0, 0)
        if batch is None:
            continue
        inside = numbers(batch)
        assert len(set(inside)) == len(inside)
        replayed = [k for k in inside if k in fresh_so_far]
        fresh = [k for k in inside if k not in fresh_so_far]
        assert inside == fresh + replayed
        assert fresh == list(range(len(fresh_so_far), i + 1))
        assert set(replayed) <= set(fresh_so_far[-slots:])
        assert batch.replayed_rows == sum(rows[k] for k in replayed)
        assert len(batch.versions) == len(inside)
        fresh_so_far += fresh


@pytest.mark.parametrize("proportion", [0.25, 0.5, 1.0, 3.0])
def test_the_proportion_holds_in_the_mean(proportion):
    mix = mixer(40, proportion, 50)
    fresh = replayed = 0
    for i in range(6000):
        batch = mix.add(fragment(i, 4 + i % 3), 0.0, 0)
        if batch is not None and i > 300:
            replayed += batch.replayed_rows
            fresh += batch.count - batch.replayed_rows
            assert batch.count >= 40 - 6
    assert replayed / fresh == pytest.approx(proportion, rel=0.03)


def test_settings_that_cannot_work_are_named():
    for bad in ((0, 0.0, 0), (1, -0.1, 1), (1, 0.0, -1)):
        with pytest.raises(ConfigError, match="replay_proportion and replay_buffer_num_slots"):
            mixer(*bad)
    with pytest.raises(ConfigError, match=r"replay_proportion=0\.5 needs replay_buffer_num_slots"):
        mixer(1, 0.5, 0)
