"""Public checks for envs, and tiny envs whose every value is known."""

from rlsample.testing.base_env_player import ConformanceError
from rlsample.testing.base_env_rules import check_base_env
from rlsample.testing.scripted import CountEnv, CountVectorEnv

__all__ = ["ConformanceError", "CountEnv", "CountVectorEnv", "check_base_env"]
