"""What a run reports: one flat dict per iteration under the field's usual tags, and a summary at the end.

Tags are those of Stable-Baselines3 where it has one: ``rollout/ep_rew_mean``, ``time/total_timesteps``, ``train/loss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TrainResult", "time_shares"]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        env_steps: rows sampled, counted, over all resumes.
        seconds: wall-clock time of the iterations, over all resumes, without start-up.
        return_mean: mean raw return of the last 100 episodes (fewer if fewer ended); None before the first end.
        episodes: episodes that ended.
        algo, env, seed: what was run.
        stopped_by: ``stop_return``, ``max_steps`` or ``request`` (Ctrl-C, :meth:`Trainer.request_stop`).
        checkpoint: the last checkpoint, or None.
    """

    env_steps: int
    seconds: float
    return_mean: float | None
    episodes: int
    algo: str
    env: str
    seed: int
    stopped_by: str
    checkpoint: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """What ``rlsample train --json`` prints."""
        names = ("env_steps", "seconds", "return_mean", "episodes", "algo", "env", "seed")
        return {name: getattr(self, name) for name in names}


def time_shares(timers: Mapping[str, float], seconds: float, num_workers: int = 0) -> dict[str, float]:
    """Where samplers spent their time: without workers fractions of the iteration; with workers fractions of each
    worker's own time up to the samples that came in this iteration, waiting included, averaged over the workers.

    Args:
        timers: means per poll over this iteration, as :meth:`CommonPolicyEvaluator.get_timers` gives them.
        seconds: its wall-clock time.
        num_workers: how many evaluators sampled beside the local one.

    Returns:
        ``time/env_share``, ``time/infer_share``, ``time/process_share``, and the rest: ``time/learn_share``, or with
        workers ``time/other_share``. They sum to 1. Empty if nothing was sampled.
    """
    polls = timers.get("sampler/polls", 0)
    if not polls or seconds <= 0:
        return {}
    names = {"env": "env_ms", "infer": "infer_ms", "process": "processing_ms"}
    spent = {name: timers[f"sampler/{timer}"] for name, timer in names.items()}
    own = timers.get("sampler/elapsed_ms") if num_workers else None
    per_poll = 1000 * seconds * max(1, num_workers) / polls if own is None else own
    per_poll = max(per_poll, sum(spent.values()))  # a sampling thread's poll may have begun before
    shares = {f"time/{name}_share": value / per_poll for name, value in spent.items()}
    shares["time/other_share" if num_workers else "time/learn_share"] = max(0.0, 1.0 - sum(shares.values()))
    return shares
