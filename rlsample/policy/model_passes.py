"""Forward and backward through a model, with numpy arrays on the outside.

Losses with gradients in closed form need only this of a model: its outputs for a batch, and then the parameters'
gradients from those of the outputs. :class:`TorchPass` leaves both to autograd. :class:`ChainPass` does the few matrix
products of a small net itself, in half the time: such nets cost autograd more in calls than in numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rlsample.policy.models import Chains, Layer
from rlsample.policy.obs_encoding import Encoded
from rlsample.torch_view import as_tensor

__all__ = ["ChainPass", "ModelPass", "TorchPass"]


class ModelPass(ABC):
    """One forward pass, then one backward pass. Not for two threads at once."""

    @abstractmethod
    def forward(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        """``(inputs, values)`` for N encoded observations (arrays): float32 [N, num_inputs] and [N]."""

    @abstractmethod
    def backward(self, d_inputs: np.ndarray, d_values: np.ndarray) -> None:
        """Sets the parameters' ``.grad``, which is zero before, for the last forward pass."""


class TorchPass(ModelPass):
    """Any model, on any device, by autograd."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        images = tuple(as_tensor(image).to(self._device) for image in encoded.images)
        self._outputs = self._model(Encoded(as_tensor(encoded.flat).to(self._device), images))
        inputs, values = (output.detach().cpu().numpy() for output in self._outputs)
        return inputs, values

    def backward(self, d_inputs: np.ndarray, d_values: np.ndarray) -> None:
        gradients = [torch.from_numpy(gradient).to(self._device) for gradient in (d_inputs, d_values)]
        torch.autograd.backward(self._outputs, gradients)
        self._outputs = ()


class ChainPass(ModelPass):
    """Linear and activation layers on the CPU, on the parameters' own memory.

    Args:
        chains: the model's layers; their parameters have a ``.grad``.
        log_std: parameter whose elements are appended to every row of the policy's outputs, or None.
    """

    def __init__(self, chains: Chains, log_std: nn.Parameter | None) -> None:
        self._trunk, self._policy, self._value = (_Net(part) for part in (chains.trunk, chains.policy, chains.value))
        self._log_std = None if log_std is None else (log_std.detach().numpy(), _grad(log_std))

    def forward(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        features = self._trunk.forward(encoded.flat)
        inputs = self._policy.forward(features)
        if self._log_std is not None:
            log_std = np.broadcast_to(self._log_std[0], (len(inputs), len(self._log_std[0])))
            inputs = np.concatenate((inputs, log_std), axis=1)
        return inputs, self._value.forward(features)[:, 0]

    def backward(self, d_inputs: np.ndarray, d_values: np.ndarray) -> None:
        if self._log_std is not None:
            free = len(self._log_std[0])
            np.add.reduce(d_inputs[:, -free:], axis=0, out=self._log_std[1])
            d_inputs = d_inputs[:, :-free]
        goes_on = self._trunk.has_layers
        d_policy = self._policy.backward(d_inputs, goes_on)
        d_value = self._value.backward(d_values[:, None], goes_on)
        if d_policy is not None and d_value is not None:
            self._trunk.backward(d_policy + d_value, False)


class _Net:
    """Consecutive layers; ``backward`` follows ``forward``."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = [
            (layer.linear.weight.detach().numpy(), layer.linear.bias.detach().numpy(), layer.activation)
            for layer in layers
        ]
        self._grads = [(_grad(layer.linear.weight), _grad(layer.linear.bias)) for layer in layers]
        self._seen: list[np.ndarray] = []

    @property
    def has_layers(self) -> bool:
        return bool(self._layers)

    def forward(self, x: np.ndarray) -> np.ndarray:
        self._seen = [x]
        for weight, bias, activation in self._layers:
            x = x.dot(weight.T)
            x += bias
            if activation:
                _ACTIVATE[activation](x)
            self._seen.append(x)
        return x

    def backward(self, d: np.ndarray, to_input: bool) -> np.ndarray | None:
        """From the gradient of the output to that of the input (if asked for), by way of the parameters."""
        ones = np.ones(len(d), np.float32)
        for i in reversed(range(len(self._layers))):
            weight, _, activation = self._layers[i]
            weight_grad, bias_grad = self._grads[i]
            if activation:
                _DERIVE[activation](d, self._seen[i + 1])
            np.dot(d.T, self._seen[i], out=weight_grad)
            np.dot(ones, d, out=bias_grad)
            if i or to_input:
                d = d.dot(weight)
        self._seen = []
        return d if to_input else None


def _grad(parameter: Tensor) -> np.ndarray:
    assert parameter.grad is not None
    return parameter.grad.numpy()


def _tanh(x: np.ndarray) -> None:
    np.tanh(x, out=x)


def _relu(x: np.ndarray) -> None:
    np.maximum(x, np.float32(0), out=x)


def _derive_tanh(d: np.ndarray, y: np.ndarray) -> None:
    np.multiply(y, y, out=y)
    np.subtract(np.float32(1), y, out=y)
    np.multiply(d, y, out=d)


def _derive_relu(d: np.ndarray, y: np.ndarray) -> None:
    np.multiply(d, y > 0, out=d)


_ACTIVATE: dict[str, Callable[[np.ndarray], None]] = {"tanh": _tanh, "relu": _relu}

# In place: d times the activation's derivative, a function of its output y. It uses y up: the layer above, whose input
# y is, took its gradient before.
_DERIVE: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"tanh": _derive_tanh, "relu": _derive_relu}
