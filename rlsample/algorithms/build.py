"""From a config to the evaluators it describes."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import numpy as np

from rlsample.algorithms.presets import find_algorithm
from rlsample.algorithms.run_config import RunConfig, env_name
from rlsample.engine.process_engine import ProcessEngine
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.evaluator_server import MAX_WORKERS
from rlsample.offline.log_writer import LogWriter
from rlsample.offline.run_ends import InputJudge, make_input
from rlsample.optimizers.sync_replay_optimizer import ReplaySettings
from rlsample.policy.random_policy import RandomPolicy

__all__ = ["build_evaluator", "build_evaluators", "child_seed", "fit_images", "make_judge"]

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000  # of random play for image_norm_steps


def build_evaluator(config: RunConfig, **changes: Any) -> CommonPolicyEvaluator:
    """The local evaluator of a config; ``changes`` go to its constructor in place of what the config says."""
    algorithm = find_algorithm(config.train.algo)
    arguments: dict[str, Any] = {
        "num_envs": config.train.num_envs,
        "seed": config.train.seed,
        **vars(config.sampler),
        **vars(config.envs),
        **changes,
    }
    make_policy = functools.partial(algorithm.make_policy, settings=config.policy)
    return CommonPolicyEvaluator(config.train.env, make_policy, **arguments)


def build_evaluators(config: RunConfig, callbacks: Callbacks | None = None) -> EvaluatorSet:
    """The local evaluator, and ``num_workers`` in processes of their own; each of these has a copy of the callbacks."""
    _check_logs(config)
    make = functools.partial(_build_numbered, config, callbacks)
    num_workers = config.train.num_workers or 0
    engine = ProcessEngine(config.engine) if num_workers else None
    return EvaluatorSet.create(make, num_workers, engine, config.workers)


def _build_numbered(config: RunConfig, callbacks: Callbacks | None, worker_index: int) -> CommonPolicyEvaluator:
    """Number 0 learns, on the first of the optimizer's ``devices`` if it has some; the others sample on the CPU."""
    devices = getattr(config.learning, "devices", None)
    device = "cpu" if worker_index else devices[0] if devices and devices != ("cpu",) else None
    if device is not None and hasattr(config.policy, "device"):
        config = dataclasses.replace(config, policy=dataclasses.replace(config.policy, device=device))
    if not config.offline.samples:  # the env is there for its spaces
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_envs=1))
    evaluator = build_evaluator(config, callbacks=callbacks, worker_index=worker_index)
    try:
        _attach_logs(evaluator, config, worker_index)
    except BaseException:
        evaluator.close()
        raise
    return evaluator


def _check_logs(config: RunConfig) -> None:
    """Raises ConfigError for logs that cannot work in this run."""
    offline, algo = config.offline, config.train.algo
    if offline.input is offline.output is None:
        return
    if config.sampler.observation_filter != "NoFilter":
        raise ConfigError(
            f"logs hold what the policy saw; through observation_filter={config.sampler.observation_filter!r}, whose "
            "statistics change, nobody else can read them: use NoFilter with input and output"
        )
    if not offline.samples and config.train.stop_return is not None:
        raise ConfigError("stop_return needs sampled episodes, and with this input there are none; set max_steps alone")
    if offline.input is not None and not issubclass(find_algorithm(algo).optimizer_settings, ReplaySettings):
        log.warning(
            "%s learns from rows of its own policy; it weighs logged rows by their action_logp, which helps as long as "
            "the two policies are close. dqn learns from any rows",
            algo,
        )


def fit_images(config: RunConfig, policy: Any) -> None:
    """Plays ``image_norm_steps`` at random, on envs made for it, and gives the policy what was seen.

    Raises:
        ConfigError: the observations have no images, or the env is an object that cannot be made a second time.
    """
    model = getattr(config.policy, "model", None)
    steps = 0 if model is None else model.image_norm_steps
    if not steps:
        return
    env, slots = config.train.env, config.train.num_envs
    if not isinstance(env, str) and not callable(env):
        raise ConfigError(f"image_norm_steps plays on envs of its own: give an id or a factory, not {env_name(env)}")
    length = math.ceil(min(steps, _ROWS_AT_ONCE) / slots)
    seed = child_seed(config.train.seed, "images")
    with CommonPolicyEvaluator(
        env, RandomPolicy, num_envs=slots, rollout_fragment_length=length, seed=seed, **vars(config.envs)
    ) as evaluator:
        policy.fit_images(evaluator.sample()["obs"] for _ in range(math.ceil(steps / (length * slots))))


def make_judge(config: RunConfig) -> InputJudge | None:
    """What estimates the policy's return from the logs, if that was asked for."""
    if not config.offline.input_evaluation:
        return None
    return InputJudge(config.offline, float(getattr(config.policy, "gamma", 1.0)))


def _attach_logs(evaluator: CommonPolicyEvaluator, config: RunConfig, worker_index: int) -> None:
    """Gives an evaluator that samples its writer, and its share of the logs to read."""
    offline, workers = config.offline, config.train.num_workers or 0
    if (workers and not worker_index) or offline.input is offline.output is None:
        return
    if offline.output is not None:
        writer = LogWriter(offline.output, offline.output_format, worker_index, offline.output_max_file_size)
        evaluator.record_to(writer)
    if offline.input is not None:
        share = (worker_index - 1) % MAX_WORKERS if workers else 0  # a replacement takes over its predecessor's
        seed = child_seed(config.train.seed, "input")
        evaluator.read_from(lambda sample: make_input(offline, evaluator.policy, share, max(1, workers), seed, sample))


def child_seed(seed: int, use: str) -> int:
    """A seed for one use of a run's seed, unrelated to the seeds of other uses, slots and policies."""
    return int(np.random.SeedSequence(seed, spawn_key=tuple(use.encode())).generate_state(1)[0])
