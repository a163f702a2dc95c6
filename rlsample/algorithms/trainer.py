"""The train loop: step the optimizer, watch the returns, write what happened, stop and save.

with Trainer(TrainSettings(algo="ppo", env="CartPole-v1", stop_return=475)) as trainer:
    result = trainer.run()
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from rlsample.algorithms.build import build_evaluators, child_seed, fit_images, make_judge
from rlsample.algorithms.presets import find_algorithm
from rlsample.algorithms.run_config import RunConfig, configure, env_name
from rlsample.algorithms.run_folder import RunFolder, find_run, load_state, read_config
from rlsample.algorithms.torch_threads import torch_threads
from rlsample.algorithms.train_result import TrainResult, time_shares
from rlsample.algorithms.train_settings import TrainSettings
from rlsample.algorithms.video import check_video, film
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.metrics import MetricsWindow
from rlsample.policy import TorchPolicy

__all__ = ["Trainer", "train"]

log = logging.getLogger(__name__)

WINDOW = 100


class Trainer:
    """Trains one policy on one env. A context manager.

    A run is a sequence of iterations; each is one ``optimizer.step()``. The same config and seed give the same weights
    and returns, bit for bit, whether the run was interrupted and resumed or not (if the env can be saved; see
    :meth:`~rlsample.env.base_env.BaseEnv.get_state`).

    While it is open, torch uses ``torch_threads`` threads in this process; :meth:`close` sets the old number again.

    Args:
        settings: :class:`TrainSettings` (the rest by preset), or a whole config of
            :func:`~rlsample.algorithms.run_config.configure`.
        callbacks: told of episodes, samples and results.
        overwrite: replace an earlier run in the output folder.

    Raises:
        ConfigError: settings that cannot work, or an output folder that holds another run.
        EnvFailedError: the env cannot be built.
    """

    def __init__(
        self, settings: TrainSettings | RunConfig, *, callbacks: Callbacks | None = None, overwrite: bool = False
    ) -> None:
        self._setup(_complete(settings), callbacks, overwrite, None)

    @classmethod
    def resume(cls, path: str | Path, *, callbacks: Callbacks | None = None, **changes: Any) -> Trainer:
        """Goes on from a run's newest checkpoint.

        Args:
            path: the run's folder, or one of its checkpoints to go on from that one; what came later is dropped then.
            callbacks: as in the constructor.
            changes: options to change, such as ``max_steps``; ``env`` if the run's env was a Python object.

        Raises:
            ConfigError: no run there, or an unknown option.
            CheckpointError: no checkpoint, or a damaged one: the message names the last good one.
        """
        folder, checkpoint = find_run(path)
        config, state = read_config(folder, changes), load_state(folder, checkpoint)
        trainer = cls.__new__(cls)
        trainer._setup(config, callbacks, False, state)
        return trainer

    def _setup(
        self, config: RunConfig, callbacks: Callbacks | None, overwrite: bool, state: Mapping[str, Any] | None
    ) -> None:
        self.config = config
        self.iteration, self.seconds, self.episodes = 0, 0.0, 0
        self.return_mean: float | None = None
        self.window = MetricsWindow(WINDOW)
        self._callbacks, self._stop_requested = callbacks, False
        self._last_checkpoint: Path | None = None
        if config.output.video:
            check_video(config.train.env)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch_threads(config.train.torch_threads))
            self.evaluators = build_evaluators(config, callbacks)
            stack.callback(self.evaluators.close)
            assert isinstance(self.evaluators.local, CommonPolicyEvaluator)
            self.evaluator = self.evaluators.local
            self._algorithm = find_algorithm(config.train.algo)
            if state is None:
                fit_images(config, self.evaluator.policy)
            self._judge = make_judge(config)
            seed = child_seed(config.train.seed, "minibatches")
            self.optimizer = self._algorithm.make_optimizer(self.evaluators, config.learning, seed)
            stack.callback(self.optimizer.close)
            if state is not None:
                self._restore(state)
            resumed = None if state is None else (self.iteration, self.env_steps)
            self.folder = RunFolder(config, overwrite, resumed)
            stack.callback(self.folder.close)
            self._closing = stack.pop_all()
        self._saved_at = (self.iteration, perf_counter())

    @property
    def env_steps(self) -> int:
        """Rows sampled so far."""
        return int(self.optimizer.num_steps_sampled)

    def run(self, on_result: Callable[[dict[str, Any]], None] | None = None) -> TrainResult:
        """Iterates until a goal is met or a stop is asked for; then saves, draws the curve, films and sums up.

        Args:
            on_result: is given each iteration's result, as :meth:`step` returns it.
        """
        reason = self._stop_reason()
        while reason is None:
            result = self.step()
            if on_result is not None:
                on_result(result)
            reason = self._stop_reason()
        if self.folder.path is not None:
            self.save()
            self.folder.draw()
            if self.config.output.video and reason != "request":
                film(self.folder.path)
        return self.summary(reason)

    def step(self) -> dict[str, Any]:
        """One iteration: sample, learn, log, and a checkpoint if one is due.

        Returns:
            Tags to numbers; None where there is no data yet (returns before the first episode end). Under
            ``optimizer/`` are the optimizer's :meth:`~rlsample.optimizers.PolicyOptimizer.stats` of this iteration.
        """
        started = perf_counter()
        stats = self.optimizer.step()
        seconds = perf_counter() - started
        self.window.add(self.evaluators.get_metrics())
        self.iteration += 1
        result = self._result(stats, seconds, self.seconds + seconds)
        if self._callbacks is not None:
            self._callbacks.on_train_result(self, result)
        self.folder.write(result)
        if self._checkpoint_due():
            self.save()
        self.seconds += perf_counter() - started
        return result

    def request_stop(self) -> None:
        """Ends :meth:`run` after the running iteration. From any thread or signal handler."""
        self._stop_requested = True

    def save(self) -> Path:
        """Writes a checkpoint now and returns its folder.

        Raises:
            CheckpointError: the disk failed. Older checkpoints are as before.
            ConfigError: the run has no output folder.
        """
        store = self.folder.checkpoints
        if store is None:
            raise ConfigError("this run has no folder to save to: set out")
        state = {
            "evaluator": self.optimizer.between_updates(self.evaluator.get_state),
            "workers": self.evaluators.get_remote_states() if self._algorithm.idle_between_steps else [],
            "optimizer": self.optimizer.save(),
            "window": self.window.get_state(),
            "iteration": self.iteration,
            "seconds": self.seconds,
            "episodes": self.episodes,
            "return_mean": self.return_mean,
        }
        self._last_checkpoint = store.save(state, self.env_steps)
        self._saved_at = (self.iteration, perf_counter())
        return self._last_checkpoint

    def summary(self, stopped_by: str) -> TrainResult:
        """The run so far."""
        train = self.config.train
        return TrainResult(
            env_steps=self.env_steps,
            seconds=self.seconds,
            return_mean=self.return_mean,
            episodes=self.episodes,
            algo=train.algo,
            env=env_name(train.env),
            seed=train.seed,
            stopped_by=stopped_by,
            checkpoint=self._last_checkpoint,
        )

    def close(self) -> None:
        """Closes envs and logs. Idempotent; no checkpoint is written here."""
        self._closing.close()

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.evaluator.set_state(state["evaluator"])
        workers = state.get("workers", [])
        all_there = len(workers) == self.evaluators.num_remote
        if all_there:
            self.evaluators.set_remote_states(workers)
        states = workers or [state["evaluator"]]
        if not all_there or (self.config.offline.samples and any(one["sampler"] is None for one in states)):
            log.warning("the checkpoint has no state of the envs: episodes start anew, the rest goes on as it was")
        self.optimizer.restore(state["optimizer"])
        self.window.set_state(state["window"])
        self.iteration, self.seconds = state["iteration"], state["seconds"]
        self.episodes, self.return_mean = state["episodes"], state["return_mean"]

    def _result(self, stats: Mapping[str, float], seconds: float, elapsed: float) -> dict[str, Any]:
        rollout = {tag: None if value != value else value for tag, value in self.window.summary().items()}
        self.episodes, self.return_mean = int(rollout["rollout/episodes"] or 0), rollout["rollout/ep_rew_mean"]
        timers = self.evaluators.get_timers()
        result: dict[str, Any] = {
            "time/iterations": self.iteration,
            "time/total_timesteps": self.env_steps,
            "time/time_elapsed": elapsed,
            "time/fps": self.env_steps / max(elapsed, 1e-9),
        }
        result.update(rollout)
        result.update({f"train/{name}": value for name, value in stats.items()})
        policy = self.evaluator.policy
        result["train/n_updates"] = policy.version
        if isinstance(policy, TorchPolicy):
            settings = policy.settings
            result["train/learning_rate"] = settings.learning_rate * policy.remaining(settings.lr_schedule)
        result.update({f"optimizer/{name}": value for name, value in self.optimizer.stats().items()})
        if self._judge is not None:
            result.update(self._judge.tags(policy, self.iteration))
        result.update({tag: None if value != value else value for tag, value in timers.items()})
        result.update(time_shares(timers, seconds, self.evaluators.num_remote))
        return result

    def _stop_reason(self) -> str | None:
        train = self.config.train
        if self._stop_requested:
            return "request"
        goal, mean = train.stop_return, self.return_mean
        if goal is not None and mean is not None and self.episodes >= WINDOW and mean >= goal:
            return "stop_return"
        return "max_steps" if self.env_steps >= train.max_steps else None

    def _checkpoint_due(self) -> bool:
        output = self.config.output
        if self.folder.checkpoints is None:
            return False
        iteration, at = self._saved_at
        every, every_s = output.checkpoint_interval_iterations, output.checkpoint_interval_s
        if every is not None and self.iteration - iteration >= every:
            return True
        return every_s is not None and perf_counter() - at >= every_s

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def train(
    options: Mapping[str, Any] | None = None,
    /,
    *,
    callbacks: Callbacks | None = None,
    overwrite: bool = False,
    **more: Any,
) -> TrainResult:
    """Trains and returns how it went: ``train(algo="ppo", env="CartPole-v1", num_envs=8, gamma=0.98)``.

    Args:
        options, more: see :func:`~rlsample.algorithms.run_config.configure`; docs/config.md lists them.
        callbacks, overwrite: see :class:`Trainer`.
    """
    with Trainer(configure(options, **more), callbacks=callbacks, overwrite=overwrite) as trainer:
        return trainer.run()


def _complete(settings: TrainSettings | RunConfig) -> RunConfig:
    return settings if isinstance(settings, RunConfig) else configure(vars(settings))
