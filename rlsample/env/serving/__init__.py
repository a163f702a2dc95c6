"""Served episodes: the environment asks, the policy answers."""

from rlsample.env.serving.multi_agent_serving_env import MultiAgentServingEnv
from rlsample.env.serving.serving_env import ServingEnv
from rlsample.env.serving.serving_env_adapter import ServingEnvAdapter
from rlsample.env.serving.serving_settings import ServingSettings

__all__ = ["MultiAgentServingEnv", "ServingEnv", "ServingEnvAdapter", "ServingSettings"]
