"""What a model looks like. Free of torch, so that configs can be read without it."""

from __future__ import annotations

from dataclasses import dataclass

from rlsample.errors import ConfigError, unknown_name
from rlsample.settings import option

__all__ = ["ACTIVATION_NAMES", "ModelSettings"]

ACTIVATION_NAMES = ("tanh", "relu")


@dataclass(frozen=True)
class ModelSettings:
    """The nets of a policy.

    Raises:
        ConfigError: an unknown activation, or a width below 1.
    """

    hidden: tuple[int, ...] = option((64, 64), "Widths of the hidden layers for observations that are no images.")
    activation: str = option("tanh", "After each hidden layer: 'tanh' or 'relu'.")
    shared: bool | None = option(
        None, "One trunk for policy and value; null: shared for images, separate nets otherwise."
    )
    image_features: int = option(512, "Width of the Linear layer after the convolutions of each image.")
    log_std_init: float = option(0.0, "Initial log standard deviation of Box actions.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for width in (*self.hidden, self.image_features):
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ConfigError(f"layer width {width!r}: must be an int of at least 1")
        if self.activation not in ACTIVATION_NAMES:
            raise unknown_name("activation", self.activation, ACTIVATION_NAMES)
