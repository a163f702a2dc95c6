"""Settings that all torch policies share. Free of torch until an optimizer is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsample.errors import ConfigError, unknown_name
from rlsample.policy.model_settings import ModelSettings
from rlsample.settings import from_options, option

if TYPE_CHECKING:
    import torch

    from rlsample.policy.flat_optimizers import FlatOptimizer

__all__ = ["TorchSettings"]

SCHEDULES = ("constant", "linear")


@dataclass(frozen=True)
class TorchSettings:
    """Model, optimizer and device of a torch policy.

    Raises:
        ConfigError: a value out of range, an unknown schedule, or a linear schedule without ``schedule_steps``.
    """

    learning_rate: float = option(3e-4, "Step size of the optimizer.")
    lr_schedule: str = option("constant", "'constant', or 'linear': down to 0 over schedule_steps.")
    schedule_steps: int = option(0, "Env steps over which linear schedules fall to 0; needed by these.")
    max_grad_norm: float | None = option(0.5, "Gradients are scaled down to this common norm; null: never.")
    optimizer: str = option("adam", "'adam' or 'rmsprop'.")
    optimizer_eps: float = option(1e-5, "Epsilon of the optimizer.")
    model: ModelSettings = option(ModelSettings(), "The nets: a mapping of the model options.")  # noqa: RUF009
    inference: str = option("auto", "Acting by 'numpy' (Linear and activation layers only), 'torch', or 'auto'.")
    device: str = option("cpu", "Torch device of the model: 'cpu', 'cuda', 'cuda:1'.")

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping):
            object.__setattr__(self, "model", from_options(ModelSettings, self.model))
        if self.optimizer not in ("adam", "rmsprop"):
            raise unknown_name("optimizer", self.optimizer, ("adam", "rmsprop"))
        if self.inference not in ("auto", "numpy", "torch"):
            raise unknown_name("inference", self.inference, ("auto", "numpy", "torch"))
        if not self.learning_rate >= 0:
            raise ConfigError(f"learning_rate {self.learning_rate}: must not be negative")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm {self.max_grad_norm}: must be above 0, or null for no clipping")
        self._check_schedule("lr_schedule", self.lr_schedule)

    def _check_schedule(self, name: str, schedule: str) -> None:
        if schedule not in SCHEDULES:
            raise unknown_name(name, schedule, SCHEDULES)
        if schedule == "linear" and self.schedule_steps < 1:
            raise ConfigError(f"{name}='linear' needs schedule_steps, the env steps after which it is 0")

    def make_optimizer(self, values: torch.Tensor) -> FlatOptimizer:
        """The optimizer of a flat tensor."""
        from rlsample.policy.flat_optimizers import Adam, RMSprop

        kind = RMSprop if self.optimizer == "rmsprop" else Adam
        return kind(values, self.learning_rate, self.optimizer_eps)
