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
        ConfigError: an unknown activation, a width below 1, or convolutions that are no triples.
    """

    hidden: tuple[int, ...] = option((64, 64), "Widths of the hidden layers for observations that are no images.")
    activation: str = option("tanh", "After each hidden layer: 'tanh' or 'relu'.")
    shared: bool | None = option(
        None, "One trunk for policy and value; null: shared for images, separate nets otherwise."
    )
    image_features: int = option(512, "Width of the Linear layer after the convolutions of each image.")
    conv_filters: tuple[int, ...] = option(
        (32, 8, 4, 64, 4, 2, 64, 3, 1),
        "Filters, kernel and stride of each convolution, one after the other. The default is made for 84x84 pixels.",
    )
    image_norm_steps: int = option(
        0,
        "Env steps of random play, before training, that give each pixel's mean and spread for images to be normalised "
        "by; 0: pixels are scaled to [0, 1].",
    )
    log_std_init: float = option(0.0, "Initial log standard deviation of Box actions.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "conv_filters", tuple(self.conv_filters))
        for width in (*self.hidden, self.image_features):
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise ConfigError(f"layer width {width!r}: must be an int of at least 1")
        if not self.conv_filters or len(self.conv_filters) % 3 or min(self.conv_filters) < 1:
            raise ConfigError(
                f"conv_filters {self.conv_filters}: must be filters, kernel and stride of each convolution, all at "
                "least 1, such as (16, 4, 2, 32, 4, 2)"
            )
        if self.image_norm_steps < 0:
            raise ConfigError(f"image_norm_steps must be 0 or more, not {self.image_norm_steps}")
        if self.activation not in ACTIVATION_NAMES:
            raise unknown_name("activation", self.activation, ACTIVATION_NAMES)
