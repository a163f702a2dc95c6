"""Checkpoints are whole or absent; each kind of damage is refused by name, with the last good one named."""

import json
import os

import numpy as np
import pytest

from rlsample.algorithms import checkpoint as module
from rlsample.algorithms.checkpoint import CheckpointStore
from rlsample.errors import CheckpointError, ConfigError


def state(step):
    return {"w": np.arange(5, dtype=np.float32) + step, "big": 2**100 + step, "env": b"\x00\xff" * step, "n": step}


def test_newest_is_loaded_and_only_the_last_k_stay(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    for step in (1, 2, 3, 10):
        store.save(state(step), step)
    assert [p.name for p in store.paths()] == ["step_000000000003", "step_000000000010"]
    loaded = store.load()
    assert loaded["n"] == 10
    assert loaded["big"] == 2**100 + 10
    assert loaded["env"] == b"\x00\xff" * 10
    assert loaded["w"].dtype == np.float32
    assert loaded["w"].tolist() == [10, 11, 12, 13, 14]
    assert store.load(store.paths()[0])["n"] == 3
    assert sorted(os.listdir(store.folder)) == ["step_000000000003", "step_000000000010"]


def test_same_step_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(1), 7)
    store.save(state(2), 7)
    assert len(store.paths()) == 1
    assert store.load()["n"] == 2


def test_saving_drops_what_a_resumed_run_left_behind(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 8, 9):
        store.save(state(step), step)
    store.save(state(4), 4)
    assert [p.name[-1] for p in store.paths()] == ["2", "4"]


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped arrays": (lambda p: flip_byte(p / "arrays.npz"), r"arrays\.npz has changed"),
    "flipped state": (lambda p: flip_byte(p / "state.json"), r"state\.json has changed"),
    "cut arrays": (lambda p: os.truncate(p / "arrays.npz", 100), r"arrays\.npz has 100 bytes, \d+ were written"),
    "no state": (lambda p: (p / "state.json").unlink(), r"state\.json cannot be read"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), r"manifest\.json is missing"),
    "cut manifest": (lambda p: os.truncate(p / "manifest.json", 20), r"manifest\.json is missing or unreadable"),
    "manifest is a list": (
        lambda p: (p / "manifest.json").write_text("[]"),
        r"manifest\.json is missing or unreadable",
    ),
    "empty manifest": (
        lambda p: (p / "manifest.json").write_text(json.dumps({"format": 1, "files": {}})),
        r"manifest\.json does not list state\.json",
    ),
    "newer format": (
        lambda p: (p / "manifest.json").write_text(json.dumps({"format": 2, "files": {}})),
        r"names format 2, this version reads 1",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_the_last_good_one_named(tmp_path, kind):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(state(step), step)
    harm, message = DAMAGE[kind]
    harm(store.paths()[2])
    with pytest.raises(CheckpointError, match=message) as caught:
        store.load()
    assert f"{tmp_path / 'step_000000000003'} is damaged" in str(caught.value)
    assert f"the last good one is {tmp_path / 'step_000000000002'}" in str(caught.value)
    harm(store.paths()[1])
    with pytest.raises(CheckpointError, match=r"the last good one is .*step_000000000001"):
        store.load()
    assert store.load(store.paths()[0])["n"] == 1


def test_no_good_one_and_none_at_all(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.load()
    store.save(state(1), 1)
    flip_byte(store.paths()[0] / "arrays.npz")
    with pytest.raises(CheckpointError, match="there is no good one beside it"):
        store.load()


@pytest.mark.parametrize("failing", ["_write_json", "_flush_folder"])
def test_a_failed_write_leaves_the_old_ones(tmp_path, monkeypatch, failing):
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, failing, fail)
        with pytest.raises(CheckpointError, match=r"step_000000000002: .*No space left"):
            store.save(state(2), 2)
    assert os.listdir(tmp_path) == ["step_000000000001"]
    assert store.load()["n"] == 1


def test_a_crash_before_the_rename_is_never_seen_and_later_swept(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    (tmp_path / ".writing-abc").mkdir()
    (tmp_path / ".writing-abc" / "arrays.npz").write_bytes(b"half")
    assert store.load()["n"] == 1
    store.save(state(2), 2)
    assert sorted(os.listdir(tmp_path)) == ["step_000000000001", "step_000000000002"]


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        CheckpointStore(tmp_path, keep=0)
