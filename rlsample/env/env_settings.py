"""How :func:`~rlsample.env.convert.as_base_env` builds and guards envs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsample.env.pool.pool_settings import PoolSettings
from rlsample.errors import ConfigError, unknown_name
from rlsample.settings import option

__all__ = ["EnvSettings"]

_VECTORIZE = ("auto", "loop", "native")
_BACKENDS = ("inline", "process")
_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True)
class EnvSettings:
    """Options of an env, the same for each of its slots.

    Raises:
        ConfigError: a value that no env could work with; an unknown word names the nearest known one.
    """

    vectorize: str = option(
        "auto",
        "auto: a spec's own vector form where it is the same env and num_envs is 8 or more; loop: one env per slot; "
        "native: the vector form or an error",
    )
    env_config: Mapping[str, Any] = option({}, "keyword arguments of a gym id or env class; ctx.config of a factory")
    allow_nonfinite: bool = option(False, "let NaN and inf in observations and rewards pass")
    max_restarts: int = option(0, "times each slot's env may be replaced after it failed")
    restart_backoff_s: float = option(
        0.1, "seconds before a slot's first restart; doubles with each further one, to 60 at most"
    )
    backend: str = option("inline", "where the envs run: inline, in the calling thread; process: on worker processes")
    pool: Mapping[str, Any] = option({}, "options of the worker processes: num_workers, batch_size, ordered, ...")

    def __post_init__(self) -> None:
        if self.vectorize not in _VECTORIZE:
            raise unknown_name("vectorize", str(self.vectorize), _VECTORIZE)
        if self.backend not in _BACKENDS:
            raise unknown_name("backend", str(self.backend), _BACKENDS)
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be an int >= 0, got {self.max_restarts!r}")
        if not self.restart_backoff_s >= 0:
            raise ConfigError(f"restart_backoff_s must be >= 0, got {self.restart_backoff_s!r}")
        if not isinstance(self.env_config, Mapping):
            raise ConfigError(f"env_config must be a mapping, got {type(self.env_config).__name__}")
        if not isinstance(self.pool, Mapping):
            raise ConfigError(f"pool must be a mapping, got {type(self.pool).__name__}")
        if self.pool and self.backend != "process":
            raise ConfigError(f"pool options ({', '.join(self.pool)}) need backend='process'")
        PoolSettings.of(self.pool)

    def back_off_s(self, restarts: int) -> float:
        """Seconds before a slot's next restart, after so many of them: at most a minute."""
        return min(self.restart_backoff_s * 2.0 ** min(restarts, 60), _MAX_BACKOFF_S)
