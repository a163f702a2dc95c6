"""matplotlib keeps the font files it has read open for the life of the process: read them before files are counted."""

import pytest

from rlsample.algorithms.learning_curve import draw_learning_curve


@pytest.fixture(scope="session", autouse=True)
def _fonts(tmp_path_factory):
    rows = [{"time/total_timesteps": 1.0, "rollout/ep_rew_mean": 1.0}]
    draw_learning_curve(rows, tmp_path_factory.mktemp("fonts") / "curve.png", "title", 1.0)
