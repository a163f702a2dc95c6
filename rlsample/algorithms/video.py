"""A film of one episode, as MP4 where ffmpeg is at hand, else as GIF."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlsample.algorithms.evaluate import load_policy, play
from rlsample.algorithms.run_folder import find_run, read_config
from rlsample.errors import ConfigError, MissingExtraError

__all__ = ["check_video", "film"]


def check_video(env: Any) -> None:
    """Finds out early whether a film can be made at the end.

    Raises:
        MissingExtraError: imageio is not installed.
        ConfigError: the env is no id, so that it cannot be built again with a camera.
    """
    if importlib.util.find_spec("imageio") is None:
        raise MissingExtraError("a video", "viz")
    if not isinstance(env, str):
        raise ConfigError("a video needs an env given by its id; film your own env by a wrapper of your own")


def film(run: str | Path, *, seed: int | None = None, deterministic: bool = True) -> Path:
    """Plays one episode with the newest checkpoint of a run and films it.

    Returns:
        ``video.mp4`` or ``video.gif`` in the run's folder.

    Raises:
        MissingExtraError: a package of the ``viz`` extra is not installed.
        ConfigError: the env has no ``rgb_array`` rendering.
    """
    folder, checkpoint = find_run(run)
    config = read_config(folder, {})
    check_video(config.train.env)
    frames: list[np.ndarray] = []
    with_camera = {**config.envs.env_config, "render_mode": "rgb_array"}
    evaluator, *_ = load_policy(checkpoint or folder, seed=seed, env_config=with_camera)
    with evaluator, _no_window():
        env = evaluator.env.sub_envs()[0]
        play(evaluator, 1, explore=not deterministic, on_poll=lambda: frames.append(_picture(env)))
        fps = float(env.metadata.get("render_fps", 30))
    return _write(frames, folder, fps)


@contextlib.contextmanager
def _no_window() -> Iterator[None]:
    """Lets pygame draw without a display: SDL reads the driver's name from the environment when it starts."""
    name = "SDL_VIDEODRIVER"
    before = os.environ.get(name)
    os.environ.setdefault(name, "dummy")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _picture(env: Any) -> np.ndarray:
    try:
        picture = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError("a video of this env", "viz") from error
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise ConfigError(f"{env} renders {type(picture).__name__}; a video needs an RGB array")
    return picture


def _write(frames: list[np.ndarray], folder: Path, fps: float) -> Path:
    import imageio.v2 as imageio

    if importlib.util.find_spec("imageio_ffmpeg") is None:
        path = folder / "video.gif"
        imageio.mimwrite(path, list[Any](frames), duration=1000 / fps, loop=0)
        return path
    path = folder / "video.mp4"
    height, width = frames[0].shape[0] // 2 * 2, frames[0].shape[1] // 2 * 2  # the codec wants even sides
    even: list[Any] = [frame[:height, :width] for frame in frames]
    imageio.mimwrite(path, even, fps=fps, macro_block_size=2)
    return path
