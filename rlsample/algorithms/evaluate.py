"""Plays whole episodes with a trained policy, without learning from them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsample.algorithms.build import build_evaluator, child_seed
from rlsample.algorithms.run_config import RunConfig, env_name
from rlsample.algorithms.run_folder import find_run, load_state, read_config
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.torch_view import check_device
from rlsample.tree import concat, gather

__all__ = ["EvalResult", "evaluate", "load_policy", "play"]

log = logging.getLogger(__name__)

MAX_SLOTS = 8


@dataclass(frozen=True)
class EvalResult:
    """Returns and lengths of the episodes played.

    Attributes:
        returns: float64[episodes], raw returns.
        lengths: int64[episodes], steps.
        algo, env, seed: the policy's algorithm, the env, the seed of these episodes.
        env_steps: how long the policy had been trained.
    """

    returns: np.ndarray
    lengths: np.ndarray
    algo: str
    env: str
    seed: int
    env_steps: int

    def to_json(self) -> dict[str, Any]:
        """What ``rlsample eval --json`` prints."""
        return {
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "episodes": len(self.returns),
            "algo": self.algo,
            "env": self.env,
            "seed": self.seed,
            "trained_env_steps": self.env_steps,
        }


def evaluate(
    path: str | Path, episodes: int = 10, *, seed: int | None = None, deterministic: bool = True, env: Any = None
) -> EvalResult:
    """Plays episodes with the newest checkpoint of a run.

    Args:
        path: the run's folder, or one of its checkpoints.
        seed: of the envs; None: one derived from the run's seed, not used in training.
        deterministic: take the distribution's mode; else draw.
        env: needed if the run's env was a Python object.

    Raises:
        ConfigError, CheckpointError: no episodes asked for; else as :meth:`Trainer.resume`.
        EnvFailedError: a sub-env failed.
    """
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1, not {episodes}")
    evaluator, config, env_steps, seed = load_policy(path, num_envs=min(episodes, MAX_SLOTS), seed=seed, env=env)
    with evaluator:
        returns, lengths = play(evaluator, episodes, explore=not deterministic)
    return EvalResult(returns, lengths, config.train.algo, env_name(config.train.env), seed, env_steps)


def load_policy(
    path: str | Path, *, num_envs: int = 1, seed: int | None = None, env: Any = None, **changes: Any
) -> tuple[CommonPolicyEvaluator, RunConfig, int, int]:
    """An evaluator with a run's weights and filter statistics, on fresh envs stepped one by one.

    It acts on the run's device, or on the CPU where that device is not here. Nothing of the checkpoint is unpickled.

    Returns:
        the evaluator (the caller closes it), the run's config, its env steps, and the seed of the envs.
    """
    folder, checkpoint = find_run(path)
    config = read_config(folder, {} if env is None else {"env": env})
    state = load_state(folder, checkpoint)
    if seed is None:
        seed = child_seed(config.train.seed, "evaluation")
    options = {"vectorize": "loop", "sample_async": False, **changes}
    config = _on_a_device_that_is_here(config)
    evaluator = build_evaluator(config, num_envs=num_envs, seed=seed, **options)
    evaluator.policy.set_state(state["evaluator"]["policy"])
    evaluator.filter.set_state(state["evaluator"]["filter"])
    return evaluator, config, int(state["optimizer"]["num_steps_sampled"]), seed


def _on_a_device_that_is_here(config: RunConfig) -> RunConfig:
    if not hasattr(config.policy, "device"):
        return config
    try:
        check_device(config.policy.device)
    except ConfigError as error:
        log.warning("%s: the policy acts on the CPU", error)
        return dataclasses.replace(config, policy=dataclasses.replace(config.policy, device="cpu"))
    return config


def play(
    evaluator: CommonPolicyEvaluator,
    episodes: int,
    *,
    explore: bool = False,
    on_poll: Callable[[], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Plays on a fresh evaluator's envs; the filter's statistics stay as they are.

    Each slot plays its share to the end, so that short episodes are not over-represented. The evaluator's ``horizon``
    ends an episode here too. The env must not be lock-step: a slot that is done just waits.

    Args:
        on_poll: called after each poll, such as to take a picture.

    Returns:
        float64[episodes], raw returns, and int64[episodes], steps; by slot, then in time.

    Raises:
        EnvFailedError: a sub-env failed.
    """
    env, horizon = evaluator.env, evaluator.settings.horizon
    left = np.full(env.num_envs, episodes // env.num_envs)
    left[: episodes % env.num_envs] += 1
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    finished: list[tuple[int, float, int]] = []
    while len(finished) < episodes:
        batch = env.poll()
        if on_poll is not None:
            on_poll()
        for error in batch.failures.values():
            raise error
        ids, stepped = batch.env_ids, ~batch.is_first
        returns[ids] += batch.rewards
        lengths[ids] += stepped
        ended = batch.terminated | batch.truncated
        if horizon is not None:
            ended |= lengths[ids] >= horizon
        for slot in ids[ended].tolist():
            finished.append((slot, float(returns[slot]), int(lengths[slot])))
            left[slot] -= 1
            returns[slot], lengths[slot] = 0.0, 0
        going = ~ended & (left[ids] > 0)
        waiting, obs = ids[going], gather(batch.obs, going)
        again = ids[ended & (left[ids] > 0)]
        if len(again):
            first = env.try_reset(again)
            if first is not None:
                waiting, obs = np.concatenate([waiting, first.env_ids]), concat([obs, first.obs])
        if len(waiting):
            actions = evaluator.policy.act(evaluator.filtered(obs), explore).actions
            env.send_actions(waiting, evaluator.sampler.to_env(actions))
    finished.sort(key=lambda episode: episode[0])
    return np.array([f[1] for f in finished]), np.array([f[2] for f in finished])
