"""A device that torch does not know, or that is not here, is refused with what to do."""

import gymnasium
import numpy as np
import pytest
import torch

from rlsample.errors import ConfigError
from rlsample.optimizers.device_group import DeviceSettings
from rlsample.policy import PPOPolicy, PPOSettings

SPACES = gymnasium.spaces.Box(-1, 1, (2,), np.float32), gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:first", ""])
def test_no_such_kind(name):
    with pytest.raises(ConfigError, match="use cpu, cuda"):
        PPOPolicy(*SPACES, settings=PPOSettings(device=name))
    with pytest.raises(ConfigError, match="use cpu, cuda"):
        DeviceSettings(devices=("cpu", name))


def test_a_cuda_device_that_is_not_here():
    missing = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(ConfigError, match=rf"torch sees {missing} CUDA devices here, so that 'cuda:{missing}'"):
        PPOPolicy(*SPACES, settings=PPOSettings(device=f"cuda:{missing}"))
    assert DeviceSettings(devices=(f"cuda:{missing}",)).devices  # settings may be read where the run was not made
