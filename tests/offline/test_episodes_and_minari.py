"""Whole episodes out of fragments, and Minari datasets in and out."""

from __future__ import annotations

import itertools
import logging
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.env.spaces import leaf_spec
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.offline import EpisodeAssembler, LogReader, MinariWriter
from rlsample.policy import RandomPolicy
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.testing.same_batch import assert_same_batch
from rlsample.tree import concat, gather, map_tree

KEPT = ["obs", "actions", "rewards", "terminated", "truncated", "next_obs"]


def piece(eps_id: int, start: int, count: int, ends: str = "") -> SampleBatch:
    """Rows start .. start+count-1; obs is 100 * eps_id + t."""
    t = np.arange(start, start + count)
    last = np.arange(count) == count - 1
    index = np.arange(1, count + 1)
    index[-1] = -1
    return SampleBatch(
        {
            "obs": (100.0 * eps_id + t).astype(np.float32)[:, None],
            "actions": t % 2,
            "rewards": t.astype(np.float32) / 7,
            "terminated": last & ("term" in ends),
            "truncated": last & ("trunc" in ends),
            "eps_id": np.full(count, eps_id),
            "t": t,
        },
        NextObs(index, np.array([[100.0 * eps_id + start + count]], np.float32)),
    )


def spans(episodes) -> list[tuple[int, int, int]]:
    return [(int(e["eps_id"][0]), int(e["t"][0]), e.count) for e in episodes]


# ---------------------------------------------------------------------- assembling


def test_pieces_are_joined_in_whatever_order_they_come():
    assembler = EpisodeAssembler()
    assert assembler.add(piece(1, 3, 2)) == []
    assert assembler.add(SampleBatch.concat([piece(2, 0, 4, "trunc"), piece(1, 5, 1, "term")]))[0]["obs"][
        :, 0
    ].tolist() == [
        200.0,
        201.0,
        202.0,
        203.0,
    ]
    assert len(assembler) == 1
    (whole,) = assembler.add(piece(1, 0, 3))
    assert whole["obs"][:, 0].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert whole["next_obs"][:, 0].tolist() == [101.0, 102.0, 103.0, 104.0, 105.0, 106.0]
    assert whole["terminated"].tolist() == [False] * 5 + [True]
    assert len(assembler) == 0


def test_what_is_not_whole_stays_and_is_given_up_at_the_end():
    assembler = EpisodeAssembler()
    for one in (piece(1, 2, 2, "term"), piece(2, 0, 3), piece(3, 0, 1), piece(3, 2, 1, "term")):
        assert assembler.add(one) == []
    assert len(assembler) == 4
    assert sorted(spans(assembler.rest())) == [(1, 2, 2), (2, 0, 3), (3, 0, 1), (3, 2, 1)]
    assert len(assembler) == 0


def test_logs_of_several_runs_with_the_same_ids_stay_apart():
    """Three runs, all with an episode 5; the third one goes over the second one's rows again."""
    one, two = piece(5, 0, 4, "term"), piece(5, 0, 6, "term")
    two["obs"] = two["obs"] + 0.5
    two = SampleBatch(dict(two.items()), NextObs(two.next_obs_source.index, two.next_obs_source.extra + 0.5))
    assembler = EpisodeAssembler()
    found = []
    for part in (two.slice(3, 6), one.slice(0, 3), two.slice(0, 3), one.slice(3, 4), two.slice(3, 6), two.slice(0, 3)):
        found += assembler.add(part)
    assert len(assembler) == 0
    for got, expected in zip(found, (two, one, two), strict=True):
        assert_same_batch(got, expected, [*KEPT, "t"])
        assert got.next_obs_source.extra.shape == (1, 1)


def test_agents_of_one_episode_are_apart():
    assembler = EpisodeAssembler()
    for agent, ends in ((0, ""), (1, "term")):
        one = piece(1, 0, 2, ends)
        one["agent_id"] = np.full(2, agent)
        assert [int(e["agent_id"][0]) for e in assembler.add(one)] == ([1] if agent else [])


def test_rows_without_episodes_are_refused():
    with pytest.raises(ConfigError, match="episodes need the columns eps_id, t, truncated; this batch has terminated"):
        EpisodeAssembler().add(SampleBatch({"terminated": np.zeros(1, bool)}))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_and_any_order_of_pieces_gives_the_episodes_back(data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    expected = {n: piece(n, 0, length, "term") for n, length in enumerate(lengths)}
    pieces = []
    for whole in expected.values():
        cuts = sorted(data.draw(st.sets(st.integers(1, 6))))
        edges = [0, *[cut for cut in cuts if cut < whole.count], whole.count]
        pieces += [whole.slice(a, b) for a, b in itertools.pairwise(edges)]
    pieces = data.draw(st.permutations(pieces))
    assembler = EpisodeAssembler()
    found = [episode for one in pieces for episode in assembler.add(one)]
    assert len(assembler) == 0
    assert sorted(int(e["eps_id"][0]) for e in found) == sorted(expected)
    for episode in found:
        assert_same_batch(episode, expected[int(episode["eps_id"][0])], [*KEPT, "t", "eps_id"])


# ---------------------------------------------------------------------- Minari

minari = pytest.importorskip("minari", reason="Minari needs rlsample[offline]")
pytest.importorskip("h5py", reason="Minari needs rlsample[offline]")

FIXED = spaces.Box(0, 1000, (1,), np.float32), spaces.Discrete(2)


def test_episodes_go_to_minari_and_come_back(tmp_path):
    """Minari itself reads T + 1 observations; images survive bit for bit, though Minari would make JPEGs of them."""
    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "arm": spaces.Box(-9, 9, (2,), np.float64)}
    )
    action_space = spaces.Tuple([spaces.Discrete(4, start=2), spaces.Box(-1, 1, (3,), np.float32)])
    rng = np.random.default_rng(0)
    episodes = [random_episode(rng, observation_space, action_space, n, length) for n, length in enumerate((3, 1, 5))]
    with MinariWriter("a/b-v0", observation_space, action_space, tmp_path / "set") as writer:
        for episode in episodes:
            writer.write(episode)
        assert not (tmp_path / "set").exists()
    data = minari.MinariDataset(tmp_path / "set" / "data")
    assert (data.id, data.total_episodes, data.total_steps) == ("a/b-v0", 3, 9)
    for found, episode in zip(data.iterate_episodes(), episodes, strict=True):
        final = episode.slice(episode.count - 1, episode.count)["next_obs"]
        seen = concat([episode["obs"], final])
        for key, column in seen.items():
            assert found.observations[key].tobytes() == column.tobytes()
            assert found.observations[key].shape == column.shape
        assert found.terminations.tolist() == episode["terminated"].tolist()
        assert found.truncations.tolist() == episode["truncated"].tolist()
        assert found.rewards.tolist() == episode["rewards"].tolist()
    with LogReader(tmp_path / "set") as reader:
        for number, (got, episode) in enumerate(zip(reader, episodes, strict=True)):
            assert_same_batch(got, episode, KEPT)
            assert got["eps_id"].tolist() == [number] * episode.count
            assert got["t"].tolist() == list(range(episode.count))
            assert got.fragment_lengths.tolist() == [episode.count]


def random_episode(rng, observation_space, action_space, eps_id, length) -> SampleBatch:
    def column(space, rows):
        def one(spec):
            if spec.dtype.kind == "f":
                values = np.frombuffer(rng.bytes(rows * int(np.prod(spec.shape)) * spec.dtype.itemsize), spec.dtype)
                return values.reshape(rows, *spec.shape).copy()
            return rng.integers(0, 2, (rows, *spec.shape)).astype(spec.dtype)

        return map_tree(one, leaf_spec(space))

    seen = column(observation_space, length + 1)
    last = np.arange(length) == length - 1
    how = rng.integers(1, 4)
    index = np.arange(1, length + 1)
    index[-1] = -1
    return SampleBatch(
        {
            "obs": gather(seen, slice(0, length)),
            "actions": column(action_space, length),
            "rewards": rng.normal(size=length).astype(np.float32),
            "terminated": last & bool(how & 1),
            "truncated": last & bool(how & 2),
            "eps_id": np.full(length, eps_id),
            "t": np.arange(length),
        },
        NextObs(index, gather(seen, slice(length, None))),
    )


def some_space():
    leaves = st.sampled_from(
        [
            spaces.Box(-1, 1, (), np.float32),
            spaces.Box(-1, 1, (2, 3), np.float64),
            spaces.Box(0, 255, (4,), np.uint8),
            spaces.Box(0, 255, (2, 2), np.uint8),
            spaces.Discrete(3),
            spaces.MultiDiscrete([2, 5]),
            spaces.MultiBinary(3),
        ]
    )
    inner = st.dictionaries(st.sampled_from(["b", "a", "c"]), leaves, min_size=1, max_size=2).map(spaces.Dict)
    return leaves | inner | st.lists(leaves | inner, min_size=1, max_size=3).map(lambda found: spaces.Tuple(found))


@settings(max_examples=12, deadline=None)
@given(some_space(), some_space(), st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_minari_carries_episodes_of_any_space(observation_space, action_space, seed, lengths):
    rng = np.random.default_rng(seed)
    episodes = [random_episode(rng, observation_space, action_space, n, length) for n, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        with MinariWriter("x-v0", observation_space, action_space, Path(folder) / "set") as writer:
            writer.write(SampleBatch.concat(episodes))
        with LogReader(Path(folder) / "set") as reader:
            for got, episode in zip(reader, episodes, strict=True):
                assert_same_batch(got, episode, KEPT)


def test_readers_share_a_minari_dataset(tmp_path):
    with MinariWriter("x-v0", *FIXED, tmp_path / "set") as writer:
        for n in range(7):
            writer.write(piece(n, 0, 2, "term"))
    shares = []
    for index in range(2):
        with LogReader(tmp_path / "set", index, 2) as reader:
            shares.append([int(batch["eps_id"][0]) for batch in reader])
    assert sorted(shares[0] + shares[1]) == list(range(7))
    assert {len(share) for share in shares} == {3, 4}


SIZES = {"hdf5": 4 * 11 + 8 * 10 + 6 * 10, "arrow": 22 * 11, "parquet": 22 * 11}


@pytest.mark.parametrize(("format", "size"), SIZES.items())
def test_minari_episodes_above_the_limit_are_skipped_unread(tmp_path, caplog, format, size):
    """By what the file declares, in HDF5; by rows, of which there is one more, and spaces in the other formats."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    (tmp_path / "data").mkdir()
    storage = MinariStorage.new(tmp_path / "data", *FIXED, data_format=format, jpeg_encoding=False)
    for length in (10, 2):
        ends = np.arange(length) == length - 1
        storage.update_episodes(
            [
                EpisodeBuffer(
                    observations=np.ones((length + 1, 1), np.float32),
                    actions=np.zeros(length, np.int64),
                    rewards=np.ones(length, np.float32),
                    terminations=ends,
                    truncations=~ends & ends,
                    infos={},
                )
            ]
        )
    with LogReader(tmp_path, max_fragment_size=size) as reader:
        assert [batch.count for batch in reader] == [10, 2]
    with caplog.at_level(logging.WARNING), LogReader(tmp_path, max_fragment_size=size - 1) as reader:
        assert [batch.count for batch in reader] == [2]
    assert f"episode 0 is damaged: its arrays have more than {size - 1} bytes" in caplog.records[0].message


def test_an_array_without_content_counts_by_what_it_declares(tmp_path, caplog):
    """HDF5 fills such arrays with zeros when they are read: a small file with a huge one."""
    import h5py

    with MinariWriter("x-v0", *FIXED, tmp_path / "set") as writer:
        for n in range(2):
            writer.write(piece(n, 0, 2, "term"))
    path = tmp_path / "set" / "data" / "main_data.hdf5"
    with h5py.File(path, "a") as file:
        file.create_dataset("episode_0/infos/x", (1 << 40,), "f8", chunks=(1 << 10,))
        file["episode_0/infos/y"] = file["episode_0"]  # groups within themselves
    assert path.stat().st_size < 1 << 20
    with caplog.at_level(logging.WARNING), LogReader(tmp_path / "set") as reader:
        assert [int(batch["eps_id"][0]) for batch in reader] == [1]
    assert "episode 0 is damaged: it has more than 65536 arrays and groups" in caplog.records[0].message
    with h5py.File(path, "a") as file:
        del file["episode_0/infos/y"]
    caplog.clear()
    with caplog.at_level(logging.WARNING), LogReader(tmp_path / "set") as reader:
        assert [int(batch["eps_id"][0]) for batch in reader] == [1]
    assert "episode 0 is damaged: its arrays have more than 536870912 bytes" in caplog.records[0].message


def test_what_is_not_whole_ends_truncated_or_is_left_out(tmp_path, caplog):
    with MinariWriter("x-v0", *FIXED, tmp_path / "set") as writer, caplog.at_level(logging.WARNING):
        writer.write(piece(1, 0, 2))  # goes on after the recording
        writer.write(piece(2, 3, 2, "term"))  # began before it
        writer.write(piece(3, 0, 1, "term"))
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'set'}: 1 episodes without their first row are left out"
    ]
    with LogReader(tmp_path / "set") as reader:
        found = list(reader)
    assert [batch["obs"][:, 0].tolist() for batch in found] == [[300.0], [100.0, 101.0]]
    assert [batch["truncated"].tolist() for batch in found] == [[False], [False, True]]
    assert found[1]["next_obs"][:, 0].tolist() == [101.0, 102.0]


@pytest.mark.parametrize("name", ["rewards", "next_obs"])
def test_batches_that_minari_could_not_hold_are_refused_whole(tmp_path, name):
    batch = piece(1, 0, 2, "term")
    columns = {key: column for key, column in batch.items() if key != name}
    bare = SampleBatch(columns, None if name == "next_obs" else batch.next_obs_source)
    with MinariWriter("x-v0", *FIXED, tmp_path / "set") as writer:
        with pytest.raises(ConfigError, match=f"'{name}'"):
            writer.write(bare)
        writer.write(batch)
        assert writer.num_episodes == 1


def test_a_dataset_is_there_whole_or_not_at_all(tmp_path):
    odd = piece(2, 0, 1, "term")
    odd["obs"] = odd["obs"].astype(np.float64)
    words = r"column 'obs' does not fit its space: float64\[1\] where the space has float32"

    def write_both() -> None:
        with MinariWriter("x-v0", *FIXED, tmp_path / "set") as writer:
            writer.write(piece(1, 0, 2, "term"))
            writer.write(odd)

    with pytest.raises(ConfigError, match=words):
        write_both()
    assert list(tmp_path.iterdir()) == []
    with MinariWriter("x-v0", *FIXED, tmp_path / "set") as writer:
        writer.write(piece(1, 0, 2, "term"))
    with pytest.raises(ConfigError, match="already; take another id or folder"):
        MinariWriter("x-v0", *FIXED, tmp_path / "set")


def test_datasets_by_their_id(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with MinariWriter("mine/x-v0", *FIXED, metadata={"description": "two rows"}) as writer:
        writer.write(piece(1, 0, 2, "term"))
    assert minari.load_dataset("mine/x-v0").total_steps == 2
    with LogReader("minari:mine/x-v0") as reader:
        assert [batch.count for batch in reader] == [2]
    with pytest.raises(ConfigError, match=r"no Minari dataset 'mine/y-v0' .* download it first"):
        LogReader("minari:mine/y-v0")


def test_a_recorded_env_in_minari(tmp_path):
    """From sampling to Minari: each episode's observations are what the env gave, the final one too."""
    env = gymnasium.make("CartPole-v1")
    with (
        CommonPolicyEvaluator("CartPole-v1", RandomPolicy, num_envs=3, rollout_fragment_length=20, seed=1) as evaluator,
        MinariWriter("c-v0", env.observation_space, env.action_space, tmp_path / "set") as writer,
    ):
        for _ in range(4):
            writer.write(evaluator.sample())
    env.close()
    data = minari.MinariDataset(tmp_path / "set" / "data")
    assert data.total_steps == 240
    ended = 0
    for episode in data.iterate_episodes():
        assert len(episode.observations) == len(episode.actions) + 1
        angle = abs(episode.observations[-1][2])
        place = abs(episode.observations[-1][0])
        out = bool(angle > 12 * 2 * np.pi / 360 or place > 2.4)
        assert episode.terminations[-1] == out
        assert episode.truncations[-1] != out
        ended += out
    assert ended > 3
