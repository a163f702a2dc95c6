"""Optimizers drive evaluators; they see evaluators and batches only. Names load on first use, torch with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsample.optimizers.async_gradients_optimizer import AsyncGradientsOptimizer, AsyncGradientsSettings
    from rlsample.optimizers.async_replay_optimizer import AsyncReplayOptimizer, AsyncReplaySettings
    from rlsample.optimizers.async_samples_optimizer import AsyncSamplesOptimizer, AsyncSamplesSettings
    from rlsample.optimizers.device_group import DeviceGroup, DeviceSettings
    from rlsample.optimizers.learner_thread import LearnerThread
    from rlsample.optimizers.microbatch_optimizer import MicrobatchOptimizer, MicrobatchSettings
    from rlsample.optimizers.multi_device_support import MultiDeviceSupport
    from rlsample.optimizers.multi_gpu_optimizer import MultiGPUOptimizer, MultiGPUSettings
    from rlsample.optimizers.policy_optimizer import PolicyOptimizer
    from rlsample.optimizers.replay_buffer import PrioritizedReplayBuffer, PrioritySettings, ReplayBuffer
    from rlsample.optimizers.sync_batch_replay_optimizer import SyncBatchReplayOptimizer, SyncBatchReplaySettings
    from rlsample.optimizers.sync_replay_optimizer import SyncReplayOptimizer, SyncReplaySettings
    from rlsample.optimizers.sync_samples_optimizer import SyncSamplesOptimizer, SyncSamplesSettings

__all__ = [
    "AsyncGradientsOptimizer",
    "AsyncGradientsSettings",
    "AsyncReplayOptimizer",
    "AsyncReplaySettings",
    "AsyncSamplesOptimizer",
    "AsyncSamplesSettings",
    "DeviceGroup",
    "DeviceSettings",
    "LearnerThread",
    "MicrobatchOptimizer",
    "MicrobatchSettings",
    "MultiDeviceSupport",
    "MultiGPUOptimizer",
    "MultiGPUSettings",
    "PolicyOptimizer",
    "PrioritizedReplayBuffer",
    "PrioritySettings",
    "ReplayBuffer",
    "SyncBatchReplayOptimizer",
    "SyncBatchReplaySettings",
    "SyncReplayOptimizer",
    "SyncReplaySettings",
    "SyncSamplesOptimizer",
    "SyncSamplesSettings",
]

_MODULES = {
    "AsyncGradientsOptimizer": "async_gradients_optimizer",
    "AsyncGradientsSettings": "async_gradients_optimizer",
    "AsyncReplayOptimizer": "async_replay_optimizer",
    "AsyncReplaySettings": "async_replay_optimizer",
    "AsyncSamplesOptimizer": "async_samples_optimizer",
    "AsyncSamplesSettings": "async_samples_optimizer",
    "DeviceGroup": "device_group",
    "DeviceSettings": "device_group",
    "LearnerThread": "learner_thread",
    "MicrobatchOptimizer": "microbatch_optimizer",
    "MicrobatchSettings": "microbatch_optimizer",
    "MultiDeviceSupport": "multi_device_support",
    "MultiGPUOptimizer": "multi_gpu_optimizer",
    "MultiGPUSettings": "multi_gpu_optimizer",
    "PolicyOptimizer": "policy_optimizer",
    "PrioritizedReplayBuffer": "replay_buffer",
    "PrioritySettings": "replay_buffer",
    "ReplayBuffer": "replay_buffer",
    "SyncBatchReplayOptimizer": "sync_batch_replay_optimizer",
    "SyncBatchReplaySettings": "sync_batch_replay_optimizer",
    "SyncReplayOptimizer": "sync_replay_optimizer",
    "SyncReplaySettings": "sync_replay_optimizer",
    "SyncSamplesOptimizer": "sync_samples_optimizer",
    "SyncSamplesSettings": "sync_samples_optimizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
