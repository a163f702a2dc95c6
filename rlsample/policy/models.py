"""Torch models: an actor and a critic from an observation space and an action distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rlsample.errors import ConfigError
from rlsample.policy.distributions import ActionDistribution
from rlsample.policy.image_norm import ImageNorm
from rlsample.policy.model_settings import ModelSettings
from rlsample.policy.obs_encoding import Encoded, ImageSpec, ObsEncoder

__all__ = ["ActorCritic", "Chains", "FlatTrunk", "ImageTrunk", "Layer"]

L = TypeVar("L", nn.Linear, nn.Conv2d)

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class Layer(NamedTuple):
    """A Linear layer and what follows it: "tanh", "relu" or "" (nothing)."""

    linear: nn.Linear
    activation: str


@dataclass(frozen=True)
class Chains:
    """A model that is nothing but Linear and activation layers, for the numpy path.

    Attributes:
        trunk: layers that both nets share; may be empty.
        policy, value: the layers after the trunk; the last one is the head.
    """

    trunk: tuple[Layer, ...]
    policy: tuple[Layer, ...]
    value: tuple[Layer, ...]


class ActorCritic(nn.Module):
    """Trunks (shared or one each), a policy head and a value head.

    ``forward(encoded) -> (inputs, values)``: float32 [K, num_inputs] for the distribution, and float32 [K].

    Args:
        encoder: gives the sizes of what is read.
        distribution: gives the number of outputs and of free inputs (log standard deviations).
    """

    def __init__(self, encoder: ObsEncoder, distribution: ActionDistribution, settings: ModelSettings) -> None:
        super().__init__()
        self._activation = settings.activation
        self.shared = bool(encoder.images) if settings.shared is None else settings.shared
        self.policy_trunk, width = _make_trunk(encoder, settings)
        self.value_trunk = None if self.shared else _make_trunk(encoder, settings)[0]
        self.policy_head = _orthogonal(nn.Linear(width, distribution.num_outputs), 0.01)
        self.value_head = _orthogonal(nn.Linear(width, 1), 1.0)
        self.log_std: nn.Parameter | None = None
        if distribution.num_free:
            self.log_std = nn.Parameter(torch.full((distribution.num_free,), float(settings.log_std_init)))

    def forward(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        features = self.policy_trunk(encoded)
        outputs = self.policy_head(features)
        if self.log_std is not None:
            outputs = torch.cat((outputs, self.log_std.expand(len(outputs), -1)), 1)
        if self.value_trunk is not None:
            features = self.value_trunk(encoded)
        return outputs, self.value_head(features).squeeze(1)

    def value(self, encoded: Encoded) -> Tensor:
        """V alone: float32 [K]."""
        trunk = self.policy_trunk if self.value_trunk is None else self.value_trunk
        return self.value_head(trunk(encoded)).squeeze(1)

    def image_norms(self) -> list[list[ImageNorm]]:
        """Per trunk, the norm of each image; empty lists where images are not normalised."""
        trunks = (self.policy_trunk, self.value_trunk)
        found = [trunk.norms for trunk in trunks if isinstance(trunk, ImageTrunk)]
        return [[norm for norm in norms if isinstance(norm, ImageNorm)] for norms in found]

    def chains(self) -> Chains | None:
        """The layers, if there are only Linear and activation layers; else None."""
        if not isinstance(self.policy_trunk, FlatTrunk):
            return None
        policy = self.policy_trunk.layers(self._activation)
        if not isinstance(self.value_trunk, FlatTrunk):
            return Chains(policy, (Layer(self.policy_head, ""),), (Layer(self.value_head, ""),))
        value = self.value_trunk.layers(self._activation)
        return Chains((), (*policy, Layer(self.policy_head, "")), (*value, Layer(self.value_head, "")))


class FlatTrunk(nn.Module):
    """Linear and activation layers over the flat vector."""

    def __init__(self, width: int, hidden: tuple[int, ...], activation: str) -> None:
        super().__init__()
        modules: list[nn.Module] = []
        for size in hidden:
            modules += [_orthogonal(nn.Linear(width, size), 2**0.5), ACTIVATIONS[activation]()]
            width = size
        self.net = nn.Sequential(*modules)

    def forward(self, encoded: Encoded) -> Tensor:
        return self.net(encoded.flat)

    def layers(self, activation: str) -> tuple[Layer, ...]:
        return tuple(Layer(module, activation) for module in self.net if isinstance(module, nn.Linear))


class ImageTrunk(nn.Module):
    """Convolutions and one Linear layer for each image, ReLU after each, joined with the flat vector.

    By default the convolutions of Mnih et al. 2015 (doi:10.1038/nature14236): 32 filters of 8x8 stride 4, 64 of 4x4
    stride 2, 64 of 3x3 stride 1. Pixels are scaled or normalised here, so that uint8 is what travels to the device.

    Attributes:
        norms: one per image where ``image_norm_steps`` is set, else none.
    """

    def __init__(self, images: tuple[ImageSpec, ...], settings: ModelSettings) -> None:
        super().__init__()
        self._specs = images
        self.nets = nn.ModuleList(_conv_net(spec, settings) for spec in images)
        self.norms = nn.ModuleList(ImageNorm(spec.shape) for spec in images if settings.image_norm_steps)

    def forward(self, encoded: Encoded) -> Tensor:
        parts = [encoded.flat] if encoded.flat.shape[1] else []
        for i, (spec, net, image) in enumerate(zip(self._specs, self.nets, encoded.images, strict=True)):
            image = self.norms[i](image) if self.norms else image.float() * (1 / 255)
            if spec.channel_axis is None:
                image = image[:, None]
            elif spec.channel_axis == -1:
                image = image.permute(0, 3, 1, 2)
            parts.append(net(image))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _conv_net(spec: ImageSpec, settings: ModelSettings) -> nn.Sequential:
    if spec.channel_axis is None:
        channels, (height, width) = 1, spec.shape
    elif spec.channel_axis == -1:
        height, width, channels = spec.shape
    else:
        channels, height, width = spec.shape
    gain = 2**0.5
    modules: list[nn.Module] = []
    numbers = settings.conv_filters
    for filters, kernel, stride in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if kernel > min(height, width):
            raise ConfigError(
                f"conv_filters {numbers}: a kernel of {kernel}x{kernel} does not fit the {height}x{width} that are "
                f"left of an image of shape {spec.shape}"
            )
        modules += [_orthogonal(nn.Conv2d(channels, filters, kernel, stride), gain), nn.ReLU()]
        channels, height, width = filters, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    last = nn.Linear(channels * height * width, settings.image_features)
    return nn.Sequential(*modules, nn.Flatten(), _orthogonal(last, gain), nn.ReLU())


def _make_trunk(encoder: ObsEncoder, settings: ModelSettings) -> tuple[FlatTrunk | ImageTrunk, int]:
    """The trunk and the width of its features."""
    if encoder.images:
        width = encoder.flat_width + len(encoder.images) * settings.image_features
        return ImageTrunk(encoder.images, settings), width
    trunk = FlatTrunk(encoder.flat_width, settings.hidden, settings.activation)
    return trunk, settings.hidden[-1] if settings.hidden else encoder.flat_width


def _orthogonal(layer: L, gain: float) -> L:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
