"""Served episodes: the environment asks, the policy answers."""

from rlsample.env.serving.serving_env import ServingEnv
from rlsample.env.serving.serving_env_adapter import ServingEnvAdapter
from rlsample.env.serving.serving_settings import ServingSettings

__all__ = ["ServingEnv", "ServingEnvAdapter", "ServingSettings"]
