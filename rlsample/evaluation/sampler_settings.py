"""How an evaluator samples."""

from __future__ import annotations

from dataclasses import dataclass

from rlsample.errors import ConfigError, unknown_name
from rlsample.settings import option

__all__ = ["BATCH_MODES", "SamplerSettings"]

BATCH_MODES = ("truncate_episodes", "complete_episodes")
_QUEUE_FULL = ("auto", "wait", "drop_oldest")


@dataclass(frozen=True)
class SamplerSettings:
    """Options of :class:`~rlsample.evaluation.CommonPolicyEvaluator` about sampling."""

    rollout_fragment_length: int = option(200, "rows each slot adds to one sample()")
    batch_mode: str = option(
        "truncate_episodes",
        "truncate_episodes: rollout_fragment_length x num_envs rows, cut where that falls; "
        "complete_episodes: whole episodes, at least that many rows",
    )
    horizon: int | None = option(None, "end an episode after this many steps, as truncated")
    soft_horizon: bool = option(False, "at the horizon start a new episode without resetting the env")
    no_done_at_end: bool = option(False, "never mark a row terminated or truncated; ends are bootstrapped like cuts")
    clip_rewards: bool | float = option(
        False, "true: keep only the sign; a number c: clip to [-c, c]. Reported returns stay unclipped"
    )
    clip_actions: bool = option(
        True, "clip Box actions to the bounds before the env gets them; the batch keeps the policy's"
    )
    normalize_actions: bool = option(False, "map Box actions from [-1, 1] to the bounds before the env gets them")
    observation_filter: str = option("NoFilter", "NoFilter or MeanStdFilter (running mean and std)")
    update_filter: bool = option(True, "let sampled observations change the filter's statistics (evaluation: false)")
    explore: bool = option(True, "draw actions; false: the most likely one")
    sample_async: bool | None = option(
        None, "sample in a thread of its own, ahead of the caller; none: for served envs, whose clients must not wait"
    )
    sample_queue_size: int = option(1, "batches the sampling thread may finish ahead")
    sample_queue_full: str = option(
        "auto",
        "when those are ready: wait, or drop_oldest and go on (their rows are counted as sampler/rows_dropped); "
        "auto: drop_oldest for served envs, else wait",
    )
    postprocess: bool = option(True, "let the policy add its learning columns to each batch")

    def __post_init__(self) -> None:
        if self.rollout_fragment_length < 1:
            raise ConfigError(f"rollout_fragment_length must be at least 1, not {self.rollout_fragment_length}")
        if self.batch_mode not in BATCH_MODES:
            raise unknown_name("batch_mode", self.batch_mode, BATCH_MODES)
        if self.horizon is not None and self.horizon < 1:
            raise ConfigError(f"horizon must be at least 1 step or None, not {self.horizon}")
        if self.soft_horizon and self.horizon is None:
            raise ConfigError("soft_horizon needs a horizon: set horizon=N")
        if not isinstance(self.clip_rewards, bool) and self.clip_rewards <= 0:
            raise ConfigError(f"clip_rewards must be true, false or a positive number, not {self.clip_rewards}")
        if self.sample_queue_full not in _QUEUE_FULL:
            raise unknown_name("sample_queue_full", self.sample_queue_full, _QUEUE_FULL)
        if self.sample_queue_size < 1:
            raise ConfigError(f"sample_queue_size must be at least 1, not {self.sample_queue_size}")
