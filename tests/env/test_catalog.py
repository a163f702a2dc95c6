"""What can be made here by name."""

import importlib.util

import gymnasium
import pytest

from rlsample.env import as_base_env
from rlsample.env.atari_settings import rom_id
from rlsample.env.catalog import EnvRecord, list_all_envs
from rlsample.errors import ConfigError, EnvFailedError
from rlsample.testing import CountEnv


def by_family():
    families = {}
    for record in list_all_envs():
        families.setdefault(record.family, []).append(record)
    return families


def test_records_are_sorted_and_each_id_occurs_once():
    records = list_all_envs()
    assert records == sorted(records, key=lambda r: (r.family, r.id))
    assert len({r.id for r in records}) == len(records)
    assert EnvRecord("CartPole-v1", "classic control", True, "", 500, True) in records
    assert EnvRecord("atari:MsPacman-v5", "atari (C++)", True, "", 27_000, True) in records


@pytest.mark.parametrize("family", ["classic control", "toy text"])
def test_what_is_said_to_be_here_can_be_made(family):
    records = by_family()[family]
    assert len(records) >= 5
    for record in records:
        assert record.installed
        with as_base_env(record.id) as env:
            assert env.num_envs == 1


def test_every_atari_name_is_a_game():
    families = by_family()
    games = [rom_id(r.id.removeprefix("atari:")) for r in families["atari (C++)"]]
    assert len(set(games)) == len(games) > 100
    assert "ALE/Pong-v5" in [r.id for r in families["ALE"]]


@pytest.mark.parametrize(
    ("family", "module", "env_id"), [("box2d", "Box2D", "LunarLander-v3"), ("mujoco", "mujoco", "Ant-v5")]
)
def test_what_is_missing_says_what_to_install(family, module, env_id):
    records = {r.id: r for r in by_family()[family]}
    here = importlib.util.find_spec(module) is not None
    assert records[env_id].installed == here
    assert records[env_id].install == ("" if here else f"pip install 'gymnasium[{family}]'")
    if not here:
        with pytest.raises((ConfigError, EnvFailedError)):
            as_base_env(env_id)


def test_without_ale_py(monkeypatch):
    monkeypatch.setattr("rlsample.env.catalog._has", lambda module: module != "ale_py")
    atari = [r for r in list_all_envs() if r.family == "atari (C++)"]
    assert atari == [EnvRecord("atari:Pong-v5", "atari (C++)", False, "pip install ale-py", 27_000, True)]


def test_envs_of_other_packages_are_under_their_name():
    gymnasium.register("counting/Count-v0", entry_point=CountEnv, max_episode_steps=7)
    gymnasium.register("counting/Text-v0", entry_point="some_package.envs:TextEnv")
    try:
        records = {r.id: r for r in list_all_envs()}
        assert records["counting/Count-v0"] == EnvRecord("counting/Count-v0", "rlsample", True, "", 7, False)
        assert records["counting/Text-v0"].family == "some_package"
    finally:
        for env_id in ("counting/Count-v0", "counting/Text-v0"):
            del gymnasium.registry[env_id]


def test_adapters_that_want_an_env_are_left_out():
    assert "GymV26Environment-v0" in gymnasium.registry
    assert not [r for r in list_all_envs() if r.id.startswith("Gym")]
