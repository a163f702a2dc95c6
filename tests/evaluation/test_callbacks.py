"""Callbacks: known which are used, and a misspelt one is no silent no-op."""

from __future__ import annotations

import pytest

from rlsample.errors import ConfigError
from rlsample.evaluation.callbacks import Callbacks, Episode

NAMES = ["on_episode_start", "on_episode_step", "on_episode_end", "on_sample_end", "on_train_result"]


def test_the_base_uses_nothing_and_each_method_does_nothing() -> None:
    callbacks = Callbacks()
    assert [callbacks.uses(name) for name in NAMES] == [False] * 5
    episode = Episode(env_id=1, eps_id=2)
    for name in NAMES[:3]:
        assert getattr(callbacks, name)(episode) is None
    assert callbacks.on_sample_end(None, None) is callbacks.on_train_result(None, {}) is None
    assert (episode.user_data, episode.custom_metrics) == ({}, {})


@pytest.mark.parametrize("name", NAMES)
def test_an_override_is_used_also_when_inherited_or_set_on_the_object(name: str) -> None:
    one = type("One", (Callbacks,), {name: lambda self, *args: None})
    two = type("Two", (one,), {})
    single = Callbacks()
    setattr(single, name, lambda *args: None)
    for callbacks in (one(), two(), single):
        assert [n for n in NAMES if callbacks.uses(n)] == [name]


def test_a_misspelt_callback_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown callback 'on_episode_ends'; did you mean 'on_episode_end'"):
        type("Bad", (Callbacks,), {"on_episode_ends": lambda self, episode: None})
    with pytest.raises(ConfigError, match="did you mean 'on_episode_step'"):
        Callbacks().uses("on_episode_stop")
    assert type("Good", (Callbacks,), {"helper": lambda self: 3})().helper() == 3


def test_an_episode_has_its_own_data_and_no_other_attributes() -> None:
    a, b = Episode(env_id=0, eps_id=7), Episode(env_id=1, eps_id=8)
    a.user_data["x"] = 1
    a.custom_metrics["y"] = 2.0
    a.last_info["z"] = 3
    assert (b.user_data, b.custom_metrics, b.last_info) == ({}, {}, {})
    assert (b.env_id, b.eps_id, b.length, b.episode_return, b.last_reward) == (1, 8, 0, 0.0, 0.0)
    assert b.last_obs is b.last_action is None
    with pytest.raises(AttributeError):
        a.lenght = 3  # type: ignore[attr-defined]
