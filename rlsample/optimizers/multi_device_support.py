"""What an evaluator must offer so that loaders and several devices can train it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlsample.errors import ConfigError
from rlsample.evaluation.policy_evaluator import PolicyEvaluator

if TYPE_CHECKING:
    import torch

    from rlsample.policy.loaded_rows import LoadedRows

__all__ = ["MultiDeviceSupport", "find_support"]

_FIX = (
    "give it a method multi_device_support() that returns the columns its loss takes, its module, the loss on loaded "
    "rows and an update (see rlsample.optimizers.MultiDeviceSupport and examples/multi_device.py)"
)


@runtime_checkable
class MultiDeviceSupport(Protocol):
    """The capability: an evaluator (or its policy) returns one from ``multi_device_support()``.

    It is the evaluator's own: training its module changes what ``evaluator.get_weights()`` gives. With several devices
    it is pickled once per further device; each copy lives in a process of its own, computes the loss on its share of
    the rows and takes the same updates. Like the weights, the optimizer's state must therefore be pickled with it. If
    the weights were set from outside meanwhile, new copies are made before the next pass.

    Optional: ``get_progress()`` and ``set_progress(progress)``, for a loss or an update that follows a schedule. Before
    each pass the copies are given what the original has; one that was behind would take other updates.

    Attributes:
        columns: names of the batch columns the loss reads; nothing else is copied. ``next_obs`` may be one.
        whole_fragments: the loss needs the rows of a fragment together and in order, and next observations
            (``rows.next_index``). Else rows come in any order.
        module: the torch module that is trained; its parameters are float32 and have ``requires_grad``.
    """

    columns: tuple[str, ...]
    whole_fragments: bool

    @property
    def module(self) -> torch.nn.Module:
        """The module."""

    def loss(self, rows: LoadedRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The **mean** loss over the rows, a scalar with a graph, and statistics: scalars, always of the same names."""

    def update(self) -> None:
        """One optimizer step by the gradients in the parameters' ``.grad``, which are already summed over devices."""

    def to(self, device: str) -> MultiDeviceSupport:
        """This, with its module on that device; or a copy of it there."""


def find_support(evaluator: PolicyEvaluator) -> MultiDeviceSupport:
    """The evaluator's capability, or that of its ``policy``.

    Raises:
        ConfigError: there is none, or what it gives is none: the message says what to add.
    """
    for owner in (evaluator, getattr(evaluator, "policy", None)):
        make: Any = getattr(owner, "multi_device_support", None)
        if make is None:
            continue
        support = make()
        missing = [
            n for n in ("columns", "whole_fragments", "module", "loss", "update", "to") if not hasattr(support, n)
        ]
        if missing:
            what = f"{type(owner).__name__}.multi_device_support() gave {type(support).__name__}"
            raise ConfigError(f"{what} without {', '.join(missing)}; see rlsample.optimizers.MultiDeviceSupport")
        return support
    raise ConfigError(f"{type(evaluator).__name__} cannot be trained from loaded rows: {_FIX}")
