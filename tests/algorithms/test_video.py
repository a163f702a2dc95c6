"""Films: a real one is made and can be read; what is missing is said before training begins."""

import importlib.util

import gymnasium
import numpy as np
import pytest

from rlsample.algorithms import Trainer, configure
from rlsample.algorithms import video as module
from rlsample.algorithms.video import check_video, film
from rlsample.errors import ConfigError, MissingExtraError

SMALL = {"num_envs": 2, "rollout_fragment_length": 8, "max_steps": 16, "tensorboard": False}
needs_imageio = pytest.mark.skipif(importlib.util.find_spec("imageio") is None, reason="needs rlsample[viz]")


class FlagEnv(gymnasium.Env):
    """Five steps; the picture is grey of brightness 40 times the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.k = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.k += 1
        return np.full(1, self.k, np.float32), 1.0, self.k == 5, False, {}

    def render(self):
        return np.full((32, 49, 3), 40 * self.k, np.uint8) if self.render_mode else None


@pytest.fixture
def run(tmp_path):
    gymnasium.register("rlsample-tests/Flag-v0", FlagEnv)
    with Trainer(configure(SMALL, env="rlsample-tests/Flag-v0", out=str(tmp_path), video=True)) as trainer:
        yield trainer
    del gymnasium.registry["rlsample-tests/Flag-v0"]


def brightness(path):
    import imageio.v2 as imageio

    with imageio.get_reader(path) as reader:
        return [frame.mean() for frame in reader]


@needs_imageio
@pytest.mark.parametrize("ffmpeg", [True, False])
def test_an_episode_is_filmed_from_first_to_last_observation(run, monkeypatch, ffmpeg):
    if not ffmpeg:
        find = importlib.util.find_spec
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda n: None if n == "imageio_ffmpeg" else find(n))
    elif importlib.util.find_spec("imageio_ffmpeg") is None:
        pytest.skip("no ffmpeg")
    run.run()
    path = run.folder.path / ("video.mp4" if ffmpeg else "video.gif")
    assert brightness(path) == pytest.approx([0, 40, 80, 120, 160, 200], abs=4)


@needs_imageio
def test_a_stopped_run_is_not_filmed(run):
    run.request_stop()
    run.run()
    assert list(run.folder.path.glob("video*")) == []


@needs_imageio
def test_an_env_without_pictures_is_named(run, monkeypatch):
    monkeypatch.setattr(FlagEnv, "render", lambda self: None)
    run.step()
    run.save()
    with pytest.raises(ConfigError, match="renders NoneType; a video needs an RGB array"):
        film(run.folder.path)


@needs_imageio
def test_a_missing_drawing_package_is_named(run, monkeypatch):
    def fail(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")

    monkeypatch.setattr(FlagEnv, "render", fail)
    run.step()
    run.save()
    with pytest.raises(MissingExtraError, match=r"rlsample\[viz\]"):
        film(run.folder.path)


def test_what_is_missing_is_said_first(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="a video needs an env given by its id"):
        check_video(FlagEnv)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rlsample\[viz\]'"):
        Trainer(configure(SMALL, env="CartPole-v1", out=str(tmp_path / "run"), video=True))
    assert not (tmp_path / "run").exists()
