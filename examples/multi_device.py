"""Train a PolicyEvaluator of your own on several devices: `--devices cpu,cpu`, or `--devices cuda:0,cuda:1`.

What it takes is `multi_device_support`: an object with the columns of the loss, the module, the loss on loaded rows,
and an update. It is pickled, optimizer and all, into the process of each further device; gradients are summed over all.
"""

import argparse

import numpy as np
import torch

from rlsample.evaluation import EvaluatorSet, PolicyEvaluator, SampleBatch
from rlsample.optimizers import MultiGPUOptimizer, MultiGPUSettings


class CriticSupport:
    """Which columns the loss takes, the module, the loss on a loaded minibatch, and the update."""

    columns = ("obs", "returns")
    whole_fragments = False  # rows may come in any order

    def __init__(self, device):
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
        self.optimizer = torch.optim.Adam(self.module.parameters(), 0.01)

    def loss(self, rows):
        loss = (self.module(rows["obs"])[:, 0] - rows["returns"]).square().mean()
        return loss, {"loss": loss}

    def update(self):
        self.optimizer.step()

    def to(self, device):
        self.module.to(device)  # in place: the optimizer goes on with the same parameters
        return self


class CriticEvaluator(PolicyEvaluator):
    """Learns the return of a made-up game from its observations."""

    def __init__(self, device="cpu", seed=0):
        self.rng = np.random.default_rng(seed)
        self.support = CriticSupport(device)

    def multi_device_support(self):
        return self.support

    def sample(self):
        obs = self.rng.normal(size=(256, 3)).astype(np.float32)
        return SampleBatch({"obs": obs, "returns": obs[:, 0] * obs[:, 1] - obs[:, 2]})

    def get_weights(self):
        return {name: p.detach().cpu().numpy().copy() for name, p in self.support.module.named_parameters()}

    def set_weights(self, weights):
        with torch.no_grad():
            for name, parameter in self.support.module.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))

    def compute_gradients(self, samples):  # for optimizers that train on this device alone
        self.support.module.zero_grad()
        loss, _ = self.support.loss(samples.to_torch())
        loss.backward()
        return [p.grad.clone() for p in self.support.module.parameters()], {"loss": float(loss)}

    def apply_gradients(self, gradients):
        for parameter, gradient in zip(self.support.module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.support.update()


parser = argparse.ArgumentParser()
parser.add_argument("--devices", default="cpu,cpu")
parser.add_argument("--quick", action="store_true")
given = parser.parse_args()
devices = tuple(given.devices.split(","))

settings = MultiGPUSettings(devices=devices, train_batch_size=256, minibatch_size=64, num_sgd_iter=4)
with MultiGPUOptimizer(EvaluatorSet(CriticEvaluator(devices[0])), settings) as optimizer:
    for step in range(1, 6 if given.quick else 101):
        stats = optimizer.step()
        if step % 5 == 0:
            print(f"{optimizer.num_steps_trained:7,} rows trained on {', '.join(devices)}: loss {stats['loss']:.4f}")
