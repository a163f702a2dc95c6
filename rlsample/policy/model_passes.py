"""Forward and backward through a model, with numpy arrays on the outside.

Losses with gradients in closed form need only this of a model: its outputs for a batch, and then the parameters'
gradients from those of the outputs. :class:`TorchPass` leaves both to autograd. :class:`ChainPass` does the few matrix
products of a small net one by one, in two thirds of the time: such nets cost autograd more in calls than in numbers.
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
    """Linear and activation layers on the CPU, without a graph: each step writes straight into the gradients.

    The products are torch's, so that ``torch.set_num_threads`` holds for them too.

    Args:
        chains: the model's layers; their parameters have a ``.grad``.
        log_std: parameter whose elements are appended to every row of the policy's outputs, or None.
    """

    def __init__(self, chains: Chains, log_std: nn.Parameter | None) -> None:
        self._trunk, self._policy, self._value = (_Net(part) for part in (chains.trunk, chains.policy, chains.value))
        self._log_std = log_std

    @torch.inference_mode()
    def forward(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        features = self._trunk.forward(as_tensor(encoded.flat))
        inputs = self._policy.forward(features)
        if self._log_std is not None:
            inputs = torch.cat((inputs, self._log_std.detach().expand(len(inputs), -1)), 1)
        return inputs.numpy(), self._value.forward(features).squeeze(1).numpy()

    @torch.inference_mode()
    def backward(self, d_inputs: np.ndarray, d_values: np.ndarray) -> None:
        d_policy = torch.from_numpy(d_inputs)
        if self._log_std is not None:
            free = len(self._log_std)
            torch.sum(d_policy[:, -free:], 0, out=self._log_std.grad)
            d_policy = d_policy[:, :-free]
        goes_on = self._trunk.has_layers
        d_features = self._policy.backward(d_policy, goes_on)
        d_other = self._value.backward(torch.from_numpy(d_values)[:, None], goes_on)
        if goes_on:
            self._trunk.backward(d_features + d_other, False)


class _Net:
    """Consecutive layers; ``backward`` follows ``forward``."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._weights = [(layer.linear.weight.detach(), layer.linear.bias.detach()) for layer in layers]
        self._seen: list[Tensor] = []

    @property
    def has_layers(self) -> bool:
        return bool(self._layers)

    def forward(self, x: Tensor) -> Tensor:
        self._seen = [x]
        for layer, (weight, bias) in zip(self._layers, self._weights, strict=True):
            x = torch.addmm(bias, x, weight.t())
            if layer.activation:
                _ACTIVATE[layer.activation](x)
            self._seen.append(x)
        return x

    def backward(self, d: Tensor, to_input: bool) -> Tensor:
        """From the gradient of the output to that of the input (if asked for), by way of the parameters."""
        ones = torch.ones(len(d))
        for i in reversed(range(len(self._layers))):
            linear, activation = self._layers[i]
            if activation:
                d = _DERIVE[activation](d, self._seen[i + 1])
            transposed = d.t()
            torch.mm(transposed, self._seen[i], out=linear.weight.grad)
            torch.mv(transposed, ones, out=linear.bias.grad)
            if i or to_input:
                d = d.mm(self._weights[i][0])
        self._seen = []
        return d


_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh_, "relu": torch.relu_}

# d times the activation's derivative, which both express by the activation's output y.
_DERIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": torch.ops.aten.tanh_backward,
    "relu": lambda d, y: torch.ops.aten.threshold_backward(d, y, 0),
}
