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
    """Where the time of one iteration went, as fractions of it.

    Args:
        timers: means per poll over this iteration, as :meth:`CommonPolicyEvaluator.get_timers` gives them.
        seconds: its wall-clock time.
        num_workers: how many evaluators sampled beside the local one; the fractions are of their time then.

    Returns:
        ``time/env_share``, ``time/infer_share``, ``time/process_share``, and the rest: ``time/learn_share``, or with
        workers ``time/other_share``.
    """
    polls = timers.get("sampler/polls", 0)
    if not polls or seconds <= 0:
        return {}
    names = {"env": "env_ms", "infer": "infer_ms", "process": "processing_ms"}
    total_ms = 1000 * seconds * max(1, num_workers)
    shares = {f"time/{name}_share": timers[f"sampler/{timer}"] * polls / total_ms for name, timer in names.items()}
    shares["time/other_share" if num_workers else "time/learn_share"] = max(0.0, 1.0 - sum(shares.values()))
    return shares
