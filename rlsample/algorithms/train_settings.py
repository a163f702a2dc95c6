"""What to train and what to leave behind: the two settings that are the trainer's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsample.errors import ConfigError
from rlsample.evaluation.evaluator_server import check_num_workers
from rlsample.settings import option

__all__ = ["OutputSettings", "TrainSettings"]


@dataclass(frozen=True)
class TrainSettings:
    """What is trained, and until when."""

    algo: str = option("ppo", "the algorithm: ppo, a2c, a3c, impala, appo, dqn or apex")
    env: Any = option("CartPole-v1", "a Gymnasium id; from Python anything as_base_env takes")  # noqa: RUF009
    num_envs: int = option(8, "slots: sub-envs stepped together")
    num_workers: int | None = option(
        None,
        "evaluators in processes that sample for the local one; none: as the algorithm likes (a3c, impala, appo and "
        "apex 2, others 0)",
    )
    seed: int = option(0, "seeds envs, policy and minibatches; the same seed gives the same run")
    stop_return: float | None = option(None, "stop once the mean return of the last 100 episodes is this or more")
    max_steps: int = option(100_000, "stop after this many env steps; schedules end there")
    torch_threads: int = option(1, "threads torch may use while training (small nets are fastest with 1); 0: as it is")

    def __post_init__(self) -> None:
        for name, least in (("num_envs", 1), ("max_steps", 1), ("torch_threads", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.num_workers is not None:
            check_num_workers(self.num_workers)
        if self.stop_return is not None and self.stop_return != self.stop_return:
            raise ConfigError("stop_return is NaN; give a number or none")


@dataclass(frozen=True)
class OutputSettings:
    """What a run leaves behind, and how often."""

    out: str | None = option(None, "folder for config, CSV, TensorBoard, checkpoints and picture; none: write nothing")
    checkpoint_interval_s: float | None = option(60.0, "save a checkpoint when this many seconds passed; none: never")
    checkpoint_interval_iterations: int | None = option(None, "also save each time this many iterations passed")
    keep_checkpoints: int = option(3, "how many of the newest checkpoints stay")
    log_interval_s: float = option(2.0, "seconds between progress lines where there is no terminal; 0: each iteration")
    tensorboard: bool = option(True, "write TensorBoard events")
    video: bool = option(False, "at the end film one episode (needs rlsample[viz])")

    def __post_init__(self) -> None:
        if self.keep_checkpoints < 1:
            raise ConfigError(f"keep_checkpoints must be at least 1, not {self.keep_checkpoints}")
        if self.checkpoint_interval_iterations is not None and self.checkpoint_interval_iterations < 1:
            raise ConfigError(
                f"checkpoint_interval_iterations must be at least 1 or none, not {self.checkpoint_interval_iterations}"
            )
        if self.checkpoint_interval_s is not None and not self.checkpoint_interval_s >= 0:
            raise ConfigError(f"checkpoint_interval_s must be 0 or more or none, not {self.checkpoint_interval_s}")
        if self.video and self.out is None:
            raise ConfigError("video needs a folder to write to: set out")
