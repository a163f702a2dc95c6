"""How served episodes are answered, limited and ended."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from rlsample.errors import ConfigError, ServingError, unknown_name
from rlsample.settings import option

__all__ = ["ServingSettings", "wait_limit"]

_LONGEST_S = threading.TIMEOUT_MAX / 2  # half of what a lock takes: it is added to the time of now
_WHEN_FULL = ("block", "error")


@dataclass(frozen=True)
class ServingSettings:
    """Options of :class:`~rlsample.env.serving.ServingEnv`.

    Raises:
        ConfigError: a value that cannot work.
    """

    max_batch: int | None = option(None, "most requests answered by one forward pass; null: all that are there")
    max_wait_us: float = option(2000.0, "most microseconds a batch waits for answered episodes that were prompt before")
    idle_timeout_s: float | None = option(300.0, "seconds without a call that end an episode as truncated; null: never")
    when_full: str = option("block", "with max_concurrent open episodes, start_episode: block (waits) or error")
    timeout_s: float = option(60.0, "seconds a call waits for an answer, a place or room in the queue")
    max_queued_rows: int = option(1000, "rows one episode may log before they are sampled; then log_action waits")
    allow_nonfinite: bool = option(False, "let NaN and inf in observations pass")

    def __post_init__(self) -> None:
        if self.when_full not in _WHEN_FULL:
            raise unknown_name("when_full", str(self.when_full), _WHEN_FULL)
        for name in ("max_batch", "max_queued_rows"):
            value = getattr(self, name)
            if value is None and name == "max_batch":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
        if not self.max_wait_us >= 0:
            raise ConfigError(f"max_wait_us must be 0 or more, got {self.max_wait_us!r}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {self.timeout_s!r}")
        if self.idle_timeout_s is not None and not self.idle_timeout_s > 0:
            raise ConfigError(f"idle_timeout_s must be above 0 or None, got {self.idle_timeout_s!r}")


def wait_limit(timeout_s: float) -> float:
    """A time-out as locks take it: none below 0, and infinity as some centuries.

    Raises:
        ServingError: it is no number.
    """
    try:
        limit_s = float(timeout_s)
        if math.isnan(limit_s):
            raise ValueError
    except (TypeError, ValueError):
        raise ServingError(f"timeout_s must be a number of seconds, got {timeout_s!r}") from None
    return max(0.0, min(limit_s, _LONGEST_S))
