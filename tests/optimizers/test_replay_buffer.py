"""Replay buffers against lists of rows: what is kept, what is drawn, whose priority changes."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.optimizers.replay_buffer import PrioritizedReplayBuffer, PrioritySettings, ReplayBuffer
from rlsample.sample_batch import NextObs, SampleBatch


def numbered(first: int, index: list[int], num_extra: int) -> SampleBatch:
    """Rows ``first`` and up, in every column in another form; extra observation e of the batch is -(first + 100 e)."""
    ids = np.arange(first, first + len(index))
    extra = -(first + 100.0 * np.arange(num_extra))
    obs = {"a": ids[:, None] * np.array([1.0, 2.0]), "b": (ids.astype(np.int32),)}
    extras = {"a": extra[:, None] * np.array([1.0, 2.0]), "b": (extra.astype(np.int32),)}
    next_obs = NextObs(np.array(index, np.int64), extras)
    return SampleBatch({"obs": obs, "rewards": ids.astype(np.float32) / 8, "id": ids}, next_obs)


def literal_rows(batch: SampleBatch) -> list[tuple[float, ...]]:
    nxt = batch["next_obs"]
    columns = batch["id"], batch["rewards"], batch["obs"]["a"][:, 1], nxt["a"][:, 1], nxt["b"][0]
    return [tuple(float(column[i]) for column in columns) for i in range(batch.count)]


@st.composite
def batches(draw):
    """Batches as the sampler, n-step windows and users make them: forward, backward, shared and unused extras."""
    found, first = [], 1
    for _ in range(draw(st.integers(1, 8))):
        count, num_extra = draw(st.integers(1, 9)), draw(st.integers(1, 3))
        index = [draw(st.integers(-num_extra, count - 1)) for _ in range(count)]
        batch = numbered(first, index, num_extra)
        form = draw(st.sampled_from(["derived", "stored", "selected"]))
        if form == "stored":
            batch = SampleBatch({**dict(batch.items()), "next_obs": batch["next_obs"]})
        elif form == "selected":
            batch = batch.select(np.arange(count))
        found.append(batch)
        first += count
    return found


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 20), st.integers(0, 7))
def test_it_holds_the_newest_rows_whole(parts, capacity, restart_at):
    buffer, literal = ReplayBuffer(capacity), []
    for i, part in enumerate(parts):
        before = copy.deepcopy(literal_rows(part))
        ids = buffer.add(part)
        assert literal_rows(part) == before
        literal += before
        assert ids.tolist() == list(range(max(len(literal) - part.count, len(literal) - capacity), len(literal)))
        kept = literal[-capacity:]
        assert len(buffer) == len(kept) <= capacity
        if i == restart_at:
            state = pickle.loads(pickle.dumps(buffer.get_state()))
            buffer = ReplayBuffer(capacity, seed=5)
            buffer.set_state(state)
        newest = np.arange(buffer.num_added - len(buffer), buffer.num_added)
        taken = buffer.take(newest)
        assert literal_rows(taken) == kept
        assert taken["replay_id"].tolist() == newest.tolist()


def test_next_observations_of_a_fragment_are_not_stored_twice():
    ring = ReplayBuffer(1000)
    next_obs = NextObs(np.append(np.arange(1, 50), -1), np.ones((1, 100), np.float32))
    for _ in range(60):
        ring.add(SampleBatch({"obs": np.zeros((50, 100), np.float32)}, next_obs))
    obs_bytes = 1000 * 100 * 4
    assert ring.nbytes < 1.1 * obs_bytes


def test_uniform_draws():
    buffer = ReplayBuffer(8, seed=3)
    for first in (1, 6, 11):
        buffer.add(numbered(first, [1, 2, 3, 4, -1], 1))
    counts = np.bincount(buffer.sample(8000)["id"], minlength=16)
    assert counts[:8].sum() == 0  # rows 1 to 7 are gone
    assert ((counts[8:16] - 1000) ** 2 / 1000).sum() < 24.3  # chi-square, 7 degrees of freedom: 0.1 % are above
    again = ReplayBuffer(8, seed=3)
    for first in (1, 6, 11):
        again.add(numbered(first, [1, 2, 3, 4, -1], 1))
    assert (np.bincount(again.sample(8000)["id"], minlength=16) == counts).all()


def test_a_column_of_another_shape_dtype_or_name_changes_nothing():
    buffer = ReplayBuffer(8, columns=["x"])
    buffer.add(SampleBatch({"x": np.arange(3, dtype=np.float32), "y": np.arange(3)}))
    for bad in (np.arange(3), np.zeros((3, 1), np.float32)):
        with pytest.raises(ConfigError, match="column 'x'"):
            buffer.add(SampleBatch({"x": bad}))
    with pytest.raises(ConfigError, match="x"):
        buffer.add(SampleBatch({"y": np.arange(3)}))
    with pytest.raises(ConfigError, match="next_obs"):
        buffer.add(SampleBatch({"x": np.arange(3, dtype=np.float32), "next_obs": np.arange(3)}))
    assert buffer.num_added == 3
    assert list(buffer.take(np.arange(3)).keys()) == ["x", "replay_id"]
    with pytest.raises(ConfigError, match="empty"):
        ReplayBuffer(4).sample(1)
    with pytest.raises(ConfigError, match="buffer_size"):
        ReplayBuffer(2).set_state(buffer.get_state())


def prioritized(capacity: int, **options: float) -> PrioritizedReplayBuffer:
    return PrioritizedReplayBuffer(capacity, seed=0, settings=PrioritySettings(**options))


def rows(*ids: int, **columns: list[float]) -> SampleBatch:
    return SampleBatch({"id": np.array(ids), **{name: np.array(value) for name, value in columns.items()}})


def test_probabilities_and_weights_are_those_of_the_formulas():
    buffer = prioritized(4, prioritized_replay_alpha=0.7, prioritized_replay_eps=0.5)
    buffer.add(rows(10, 11, 12, 13, priorities=[0.0, 1.0, -4.0, 2.5]))
    p = (np.array([0.0, 1.0, 4.0, 2.5]) + 0.5) ** 0.7
    chance = p / p.sum()
    number = 40_000
    batch = buffer.sample(number, beta=0.4)
    counts = np.bincount(batch["id"] - 10, minlength=4)
    assert (np.abs(counts - number * chance) < 2).all()  # stratified
    weights = (4 * chance) ** -0.4
    np.testing.assert_allclose(batch["weights"], (weights / weights.max())[batch["id"] - 10], rtol=1e-6)
    assert batch["weights"].dtype == np.float32
    assert "priorities" not in batch


def test_new_rows_have_the_largest_priority_ever_given():
    buffer = prioritized(3, prioritized_replay_alpha=1.0)
    ids = buffer.add(rows(0, 1))
    buffer.update_priorities(ids, np.array([7.0, 3.0]))
    buffer.update_priorities(ids, np.array([2.0, 3.0]))
    buffer.add(rows(2))
    counts = np.bincount(buffer.sample(12_000)["id"], minlength=3)
    np.testing.assert_allclose(counts, [2000, 3000, 7000], atol=2)


def test_the_priority_of_an_evicted_row_never_hits_its_successor():
    buffer = prioritized(3, prioritized_replay_alpha=1.0)
    ids = buffer.add(rows(0, 1, 2, priorities=[1.0, 1.0, 1.0]))
    buffer.add(rows(3, 4, priorities=[2.0, 3.0]))  # in the places of 0 and 1
    assert buffer.update_priorities(ids, np.array([100.0, 200.0, 5.0])) == 2
    counts = np.bincount(buffer.sample(10_000)["id"], minlength=5)
    np.testing.assert_allclose(counts, [0, 0, 5000, 2000, 3000], atol=2)
    assert buffer.update_priorities(np.array([99]), np.array([1.0])) == 1


@given(
    st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=7), min_size=1, max_size=8), st.integers(1, 9), st.data()
)
def test_priorities_against_a_literal_list(adds, capacity, data):
    buffer, literal = prioritized(capacity), {}
    for errors in adds:
        ids = buffer.add(rows(*range(len(errors)), priorities=errors))
        literal.update(zip(ids.tolist(), errors[-len(ids) :], strict=True))
        touched = np.array(data.draw(st.lists(st.sampled_from(sorted(literal)), max_size=4)), np.int64)
        new = np.array(data.draw(st.lists(st.floats(-9, 9), min_size=len(touched), max_size=len(touched))))
        buffer.update_priorities(touched, new)
        oldest = buffer.num_added - len(buffer)
        literal.update({i: abs(e) for i, e in zip(touched.tolist(), new.tolist(), strict=True)})
        kept = [(literal[i] + 1e-6) ** 0.6 for i in range(oldest, buffer.num_added)]
        np.testing.assert_allclose(buffer.get_state()["priorities"], kept)


def test_errors_that_are_not_finite_change_nothing():
    buffer = prioritized(3)
    with pytest.raises(ConfigError, match="row 1"):
        buffer.add(rows(0, 1, priorities=[1.0, np.nan]))
    assert len(buffer) == 0
    ids = buffer.add(rows(0, 1))
    with pytest.raises(ConfigError, match="row 0"):
        buffer.update_priorities(ids, np.array([np.inf, 2.0]))
    assert buffer.get_state()["priorities"].tolist() == [1.0, 1.0]


def test_the_state_continues_with_the_same_draws():
    buffer = prioritized(3)
    buffer.add(rows(0, 1, 2, 3, priorities=[4.0, 3.0, 2.0, 1.0]))
    again = PrioritizedReplayBuffer(3, seed=9)
    again.set_state(pickle.loads(pickle.dumps(buffer.get_state())))
    for _ in range(3):
        a, b = buffer.sample(5), again.sample(5)
        assert a["replay_id"].tolist() == b["replay_id"].tolist()
        assert a["weights"].tolist() == b["weights"].tolist()
    assert buffer.add(rows(9)).tolist() == again.add(rows(9)).tolist()
    np.testing.assert_array_equal(buffer.get_state()["priorities"], again.get_state()["priorities"])


def test_beta_is_annealed():
    s = PrioritySettings(final_prioritized_replay_beta=1.0, beta_annealing_steps=100)
    assert [s.beta(n) for n in (0, 50, 100, 500)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
    with pytest.raises(ConfigError, match="prioritized_replay_eps"):
        PrioritySettings(prioritized_replay_eps=0.0)


def test_a_shared_next_observation_stays_until_its_last_row_leaves():
    buffer, literal = ReplayBuffer(49), []
    for first in range(1, 121, 3):
        part = numbered(first, [-1, -1, -1], 1)
        literal += literal_rows(part)
        buffer.add(part)
        newest = np.arange(buffer.num_added - len(buffer), buffer.num_added)
        assert literal_rows(buffer.take(newest)) == literal[-49:]


def test_next_observations_of_another_form_change_nothing():
    buffer = ReplayBuffer(4)
    obs = np.arange(8, dtype=np.float32).reshape(4, 2)
    bad = [np.zeros((4, 3), np.float32), np.zeros((4, 2)), (np.zeros((4, 2), np.float32),)]
    for next_obs in bad:  # as the first batch too
        with pytest.raises(ConfigError, match="next_obs"):
            buffer.add(SampleBatch({"obs": obs, "next_obs": next_obs}))
    assert buffer.num_added == 0
    buffer.add(SampleBatch({"obs": obs, "next_obs": obs + 1}))
    for next_obs in bad:
        with pytest.raises(ConfigError, match="next_obs"):
            buffer.add(SampleBatch({"obs": -obs, "next_obs": next_obs}))
        with pytest.raises(ConfigError, match="next_obs"):
            buffer.add(SampleBatch({"obs": -obs}, NextObs(np.array([1, 2, 3, -1]), next_obs)))
    assert buffer.num_added == 4
    kept = buffer.take(np.arange(4))
    assert kept["obs"].tolist() == obs.tolist()
    assert kept["next_obs"].tolist() == (obs + 1).tolist()
