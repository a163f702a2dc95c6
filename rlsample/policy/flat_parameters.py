"""All parameters of a model in one piece of memory.

An optimizer step, a gradient's norm or zeroing then is a few calls on one array and not on a dozen: for the small nets
of classic control the number of calls is most of the cost.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from rlsample.errors import ConfigError

__all__ = ["FlatParameters"]


class FlatParameters:
    """Moves a model's parameters and their gradients into one tensor each; the model's own become views of them.

    Attributes:
        values: float32 parameter [P]: what the optimizer updates. ``values.grad`` is always there.

    Raises:
        ConfigError: a parameter that is no float32 tensor (named).
    """

    def __init__(self, model: nn.Module) -> None:
        self._spans: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        parts = []
        start = 0
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigError(f"parameter {name} has dtype {parameter.dtype}; expected float32")
            self._spans[name] = (start, start + parameter.numel(), tuple(parameter.shape))
            parts.append(parameter.detach().reshape(-1))
            start += parameter.numel()
        self.values = nn.Parameter(torch.cat(parts))
        self.grad = torch.zeros_like(self.values)
        self.values.grad = self.grad
        for name, parameter in model.named_parameters():
            first, last, shape = self._spans[name]
            parameter.data = self.values.data[first:last].view(shape)
            parameter.grad = self.grad[first:last].view(shape)

    def get(self, flat: torch.Tensor) -> dict[str, np.ndarray]:
        """A copy of a flat tensor, as float32 arrays by parameter name."""
        copy = flat.detach().cpu().numpy().copy()
        return {name: copy[first:last].reshape(shape) for name, (first, last, shape) in self._spans.items()}

    def put(self, flat: torch.Tensor, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies arrays by parameter name into a flat tensor.

        Raises:
            ConfigError: names or shapes that are not the model's; nothing was copied.
        """
        odd = sorted(set(arrays) ^ set(self._spans))
        if odd:
            raise ConfigError(f"weights do not fit the model: {', '.join(odd)} is not in both")
        for name, (_, _, shape) in self._spans.items():
            if tuple(np.shape(arrays[name])) != shape:
                raise ConfigError(f"{name} has shape {np.shape(arrays[name])}, the model's has {shape}")
        joined = np.concatenate([np.asarray(arrays[name], np.float32).reshape(-1) for name in self._spans])
        with torch.no_grad():
            flat.copy_(torch.from_numpy(joined))
