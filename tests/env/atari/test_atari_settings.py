"""Options of Atari games, and the names games go by."""

import numpy as np
import pytest

from rlsample.env.atari import make_atari
from rlsample.env.atari_settings import AtariSettings, action_meanings, atari_games, rom_id
from rlsample.errors import ConfigError


@pytest.mark.parametrize(
    ("task", "game"),
    [
        ("Pong-v5", "pong"),
        ("ALE/Pong-v5", "pong"),
        ("pong", "pong"),
        ("MsPacman-v5", "ms_pacman"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("ms_pacman", "ms_pacman"),
        ("TicTacToe3d-v5", "tic_tac_toe_3d"),
        ("ALE/TicTacToe3D-v5", "tic_tac_toe_3d"),
    ],
)
def test_a_game_goes_by_the_names_of_envpool_gymnasium_and_ale(task, game):
    assert rom_id(task) == game


def test_every_registered_ale_game_is_known():
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    ids = [i for i in gymnasium.registry if i.startswith("ALE/")]
    assert len(ids) > 100
    assert {rom_id(i) for i in ids} <= set(atari_games())


@pytest.mark.parametrize("task", ["Pongg-v5", "ALE/Pongg-v5", "pongg"])
def test_an_unknown_game_names_the_nearest(task):
    with pytest.raises(ConfigError, match=r"'pongg'; did you mean 'pong'"):
        rom_id(task)


def test_defaults_are_envpools():
    """envpool.make_gymnasium("Pong-v5").config, of version 1.2.5."""
    envpools = {
        "num_threads": 0,
        "thread_affinity_offset": -1,
        "max_episode_steps": 27000,
        "stack_num": 4,
        "frame_skip": 4,
        "noop_max": 30,
        "episodic_life": False,
        "reward_clip": False,
        "use_fire_reset": True,
        "img_height": 84,
        "img_width": 84,
        "full_action_space": False,
        "repeat_action_probability": 0.0,
        "gray_scale": True,
    }
    settings = AtariSettings()
    assert {name: getattr(settings, name) for name in envpools} == envpools
    fixed = {
        "use_inter_area_resize": True,
        "zero_discount_on_life_loss": False,
        "gym_reset_return_info": True,
        "max_num_players": 1,
        "mode": -1,
        "difficulty": -1,
    }
    assert AtariSettings.of({**envpools, **fixed}) == settings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frame_skp": 4}, "'frame_skp'; did you mean 'frame_skip'"),
        ({"frame_skip": 0}, "frame_skip must be an int >= 1, got 0"),
        ({"frame_skip": 4.0}, r"frame_skip must be an int >= 1, got 4\.0"),
        ({"stack_num": True}, "stack_num must be an int >= 1, got True"),
        ({"noop_max": -1}, "noop_max must be an int >= 0, got -1"),
        ({"thread_affinity_offset": -2}, "thread_affinity_offset must be an int >= -1, got -2"),
        ({"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
        ({"groups": 2, "batch_size": 2}, "batch_size is for first come, first served, groups for turns"),
        ({"gray_scale": 1}, "gray_scale must be true or false, got 1"),
        ({"repeat_action_probability": 1.5}, r"must be in \[0, 1\], got 1\.5"),
        ({"max_episode_steps": 2**30}, r"below 2\*\*31 frames"),
        ({"use_inter_area_resize": False}, "use_inter_area_resize can only be True: ale-py always resizes by area"),
        ({"mode": 3}, "mode can only be -1"),
    ],
)
def test_wrong_options_say_what_is_wrong(options, says):
    with pytest.raises(ConfigError, match=says):
        AtariSettings.of(options)


@pytest.mark.parametrize(
    ("num_envs", "options", "sizes"),
    [
        (5, {}, [5]),
        (5, {"groups": 2}, [3, 2]),
        (64, {"batch_size": 16}, [16] * 4),
        (10, {"batch_size": 4}, [2] * 5),
        (5, {"batch_size": 4}, [1] * 5),
        (5, {"batch_size": 5}, [5]),
    ],
)
def test_group_sizes(num_envs, options, sizes):
    """Each batch_size is a multiple of the group size, so that no batch is made of parts of groups."""
    assert AtariSettings(**options).group_sizes(num_envs) == sizes


@pytest.mark.parametrize("options", [{"groups": 4}, {"batch_size": 4}])
def test_more_groups_or_rows_than_games(options):
    with pytest.raises(ConfigError, match="=4 is more than num_envs=3"):
        AtariSettings(**options).group_sizes(3)


def test_action_meanings():
    assert action_meanings("breakout", False) == ("NOOP", "FIRE", "RIGHT", "LEFT")
    assert len(action_meanings("breakout", True)) == 18


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_envs": 0}, "num_envs must be an int of at least 1, got 0"),
        ({"num_envs": 2.5}, r"num_envs must be an int of at least 1, got 2\.5"),
        ({"num_envs": 3, "seed": [1, 2]}, "seed has 2 entries for 3 envs"),
        ({"settings": AtariSettings(), "frame_skip": 2}, r"settings or single options, not both \(got frame_skip\)"),
        ({"num_envs": 2, "groups": 3}, "groups=3 is more than num_envs=2"),
    ],
)
def test_make_atari_says_what_is_wrong(arguments, says):
    with pytest.raises(ConfigError, match=says):
        make_atari("Pong-v5", **arguments)


def test_spaces_need_no_games(scripted):
    with make_atari("Breakout-v5", 3, gray_scale=False, img_height=40, img_width=50, stack_num=2) as env:
        assert env.observation_space.shape == (2, 40, 50, 3)
        assert env.observation_space.dtype == np.uint8
        assert env.action_space.n == 4
    with make_atari("Breakout-v5", full_action_space=True) as env:
        assert env.action_space.n == 18


@pytest.mark.parametrize(
    ("options", "threads", "cores"),
    [
        ({}, [0], [-1]),
        ({"num_threads": 3}, [3], [-1]),
        ({"num_threads": 4, "groups": 2, "thread_affinity_offset": 1}, [2, 2], [1, 3]),
        ({"num_threads": 1, "groups": 2, "thread_affinity_offset": 0}, [1, 1], [0, 1]),
        ({"groups": 2, "thread_affinity_offset": 2}, [0, 0], [2, 2]),
    ],
)
def test_threads_are_shared_out_among_the_groups(scripted, plan_of, options, threads, cores):
    with scripted(4, lambda slot, game: plan_of(), **options) as env:
        env.poll()
        assert [v.opened["num_threads"] for v in scripted.vectors] == threads
        assert [v.opened["first_core"] for v in scripted.vectors] == cores


@pytest.mark.parametrize(
    ("cores", "batch_size", "threads"), [(2, 2, [1, 1]), (1, 2, [1, 1]), (9, 2, [4, 4]), (9, 4, [0])]
)
def test_first_come_groups_share_the_cores(scripted, plan_of, monkeypatch, cores, batch_size, threads):
    monkeypatch.setattr("rlsample.env.atari_opening.usable_cpus", lambda: list(range(cores)))
    with scripted(4, lambda slot, game: plan_of(), batch_size=batch_size) as env:
        env.poll()
        assert [v.opened["num_threads"] for v in scripted.vectors] == threads


@pytest.mark.parametrize(
    ("options", "opened"),
    [
        ({"batch_size": 1}, [{"same_step": False, "num_threads": 3, "first_core": -1, "batch_size": 1}]),
        ({"batch_size": 3, "num_threads": 2, "thread_affinity_offset": 1},
         [{"same_step": False, "num_threads": 2, "first_core": 1, "batch_size": 3}]),
        ({"batch_size": 4}, [{"same_step": False, "num_threads": 0, "first_core": -1, "batch_size": 0}]),
        ({"batch_size": 2, "recv_ahead": True},
         [{"same_step": False, "num_threads": 1, "first_core": -1, "batch_size": 0}] * 2),
    ],
)  # fmt: skip
def test_under_recv_a_batch_is_of_any_games(scripted, plan_of, monkeypatch, options, opened):
    """One vector env for all games, with threads for all cores even where a batch has but one row."""
    monkeypatch.setattr("rlsample.env.atari_opening.usable_cpus", lambda: [0, 1, 2])
    with scripted(4, lambda slot, game: plan_of(), **options) as env:
        env.async_reset()
        assert env.recv()[-1]["env_id"].shape == (options["batch_size"],)
        assert [v.opened for v in scripted.vectors] == opened
