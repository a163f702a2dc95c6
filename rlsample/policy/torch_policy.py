"""Base of policies with a torch model: acting, weights, gradients and state. Subclasses bring the loss."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rlsample.errors import ConfigError, SpaceError
from rlsample.policy.distributions import make_distribution
from rlsample.policy.flat_parameters import FlatParameters
from rlsample.policy.image_norm import PixelStatistics
from rlsample.policy.model_passes import ChainPass, ModelPass, TorchPass
from rlsample.policy.models import ActorCritic, Chains
from rlsample.policy.noise import NoiseStream
from rlsample.policy.numpy_inference import NumpyInference
from rlsample.policy.obs_encoding import Encoded, ObsEncoder
from rlsample.policy.one_thread import one_thread
from rlsample.policy.policy import ActOutput, Gradients, Policy, Weights
from rlsample.policy.seeded_draws import seeded_draws
from rlsample.policy.torch_settings import TorchSettings
from rlsample.sample_batch import SampleBatch
from rlsample.torch_view import as_tensor, check_device
from rlsample.tree import Tree, map_tree, num_rows

__all__ = ["TorchPolicy"]

log = logging.getLogger(__name__)

PARITY_TOLERANCE = 1e-5
_SMALL = 1 << 23  # rows times parameters: what one thread does in a millisecond or two
_ROWS_OF_A_STEP = 16  # what an optimizer's step costs, in rows


class TorchPolicy(Policy):
    """An actor-critic model in torch behind the :class:`~rlsample.policy.Policy` contract.

    A subclass implements :meth:`loss` (on :meth:`forward_torch`), or :meth:`backward` (on :meth:`forward` and
    ``model_pass``) where it has the gradients in closed form.

    Threads: one thread may act while another learns, sets weights or asks for values. Whatever reads all weights for a
    forward pass, and whatever writes them, holds one lock, so that no action comes from half-updated weights. Two
    threads must not act at once, nor learn at once.

    On the CPU, passes and updates of nets without images that are too small to be shared (rows times parameters up to
    8 million) use one torch thread; ``torch.set_num_threads`` holds for all others, and is left as it is.

    Args:
        settings: see :class:`~rlsample.policy.torch_settings.TorchSettings`.
        seed: of the initial weights and the exploration; the global generators stay untouched.

    Attributes:
        model: the torch module. Its parameters are views of one flat tensor: change them in place only, and by
            :meth:`set_weights` if this policy shall notice.
        model_pass: forward and backward on batches; without autograd where numpy inference is used on the CPU.
        inference: "numpy" or "torch": what :meth:`act` uses.

    Raises:
        SpaceError: a space that no model reads or no distribution covers.
        ConfigError: an unknown setting, or ``inference="numpy"`` with a model it cannot run.
    """

    acts_while_learning = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: TorchSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.settings = TorchSettings() if settings is None else settings
        self.extra_columns = {"action_logp": ((), np.float32), "values": ((), np.float32)}
        self.version = 0
        self.distribution = make_distribution(action_space)
        self._encoder = ObsEncoder(observation_space)
        if self._encoder.has_mask and not self.distribution.mask_sizes:
            raise SpaceError(f"observations have an action_mask, but {action_space} has no choices to mask")
        model_seed, noise_seed = np.random.SeedSequence(seed).spawn(2)
        self.device = check_device(self.settings.device)
        self._on_cpu = self.device.type == "cpu"
        with seeded_draws(int(model_seed.generate_state(1)[0])):
            self.model = self.make_model().to(self.device)
        self._parameters = FlatParameters(self.model)
        self._optimizer = self.settings.make_optimizer(self._parameters.values)
        self._noise = NoiseStream(self.distribution.noise_kinds, noise_seed)
        self._env_steps = 0
        self._lock = threading.Lock()
        chains = self._chains()
        self._numpy = None if chains is None else self._make_numpy_inference(chains, model_seed)
        self._numpy_version = 0
        self.model_pass: ModelPass = TorchPass(self.model, self.device)
        if chains is not None and self._numpy is not None and self._on_cpu:
            self.model_pass = ChainPass(chains, self.model.log_std)

    @property
    def inference(self) -> str:
        return "torch" if self._numpy is None else "numpy"

    def make_model(self) -> ActorCritic:
        """A new model on the CPU, drawn from torch's global generator, which is seeded and put back around this call.

        Override it to bring your own: ``model(encoded) -> (inputs, values)``, ``model.value(encoded)``, both of
        :class:`~rlsample.policy.obs_encoding.Encoded` tensors, and ``model.chains()`` if it has plain layers only.
        """
        return ActorCritic(self._encoder, self.distribution, self.settings.model)

    def _chains(self) -> Chains | None:
        """The model's layers, if numpy may and can run them."""
        wanted = self.settings.inference
        chains = self.model.chains() if wanted != "torch" and hasattr(self.model, "chains") else None
        if chains is None and wanted == "numpy":
            raise ConfigError("inference='numpy' runs Linear, tanh and relu layers only; use 'torch' or 'auto'")
        return chains

    # Acting

    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        engine = self._numpy
        if engine is None:
            inputs, values = self._act_torch(obs)
        else:
            with self._lock:
                if self._numpy_version != self.version:
                    self._refresh(engine)
                plan = engine.plan(num_rows(obs))
                self._encoder.write_flat(obs, plan.flat)
                inputs, values = engine.run(plan)
        if self._encoder.has_mask:
            inputs = self.distribution.apply_mask(inputs, self._encoder.mask(obs))
        noise = self._noise.take(len(inputs)) if explore else None
        actions, logp = self.distribution.act(inputs, noise)
        return ActOutput(actions, {"action_logp": logp, "values": values})

    def values(self, obs: Tree) -> np.ndarray:
        """V of K observations: float32[K], a fresh array. May be called beside :meth:`act` by another thread."""
        engine = self._numpy
        with self._lock:
            if engine is None:
                with self._threads(num_rows(obs)), torch.inference_mode():
                    return self.model.value(self._tensors(obs)).cpu().numpy()
            if self._numpy_version != self.version:
                self._refresh(engine)
            return engine.values(self._encoder.encode(obs).flat)

    def logp(self, obs: Tree, actions: Tree) -> np.ndarray:
        """Log-probability of given actions: float32[K]. May be called beside :meth:`act` by another thread."""
        inputs, _ = self._act_torch(obs)
        if self._encoder.has_mask:
            inputs = self.distribution.apply_mask(inputs, self._encoder.mask(obs))
        return self.distribution.logp(inputs, actions)

    def _act_torch(self, obs: Tree) -> tuple[np.ndarray, np.ndarray]:
        with self._lock, self._threads(num_rows(obs)), torch.inference_mode():
            inputs, values = self.model(self._tensors(obs))
            return inputs.cpu().numpy(), values.cpu().numpy()

    def _tensors(self, obs: Tree) -> Encoded:
        encoded = self._encoder.encode(obs)
        return Encoded(self.to_device(encoded.flat), tuple(self.to_device(image) for image in encoded.images))

    def _refresh(self, engine: NumpyInference) -> None:
        engine.refresh()
        self._numpy_version = self.version

    def _make_numpy_inference(self, chains: Chains, seed: np.random.SeedSequence) -> NumpyInference | None:
        """None if its answers differ from the model's, and only "auto" was asked for."""
        engine = NumpyInference(chains, self.model.log_std)
        plan = engine.plan(16)
        plan.flat[...] = np.random.default_rng(seed).normal(size=plan.flat.shape)
        got = engine.run(plan)
        with torch.inference_mode():
            expected = self.model(Encoded(self.to_device(plan.flat.copy())))
        error = max(float(np.abs(g - e.cpu().numpy()).max()) for g, e in zip(got, expected, strict=True))
        if error <= PARITY_TOLERANCE:
            return engine
        message = f"numpy inference is off by {error:.1e} from torch (allowed: {PARITY_TOLERANCE:.0e})"
        if self.settings.inference == "numpy":
            raise ConfigError(f"{message}; use inference='torch'")
        log.warning("%s; using torch", message)
        return None

    # Learning

    def loss(self, batch: SampleBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (a scalar with a graph) and statistics (scalars without)."""
        raise NotImplementedError(f"{type(self).__name__} implements neither loss nor backward")

    def backward(self, batch: SampleBatch) -> dict[str, float]:
        """Adds the loss's gradients to ``.grad`` of the parameters, which is zero before; returns statistics."""
        loss, stats = self.loss(batch)
        loss.backward()
        numbers = torch.stack([stat.detach() for stat in stats.values()]).tolist()
        return dict(zip(stats, numbers, strict=True))

    def forward(self, batch: SampleBatch) -> tuple[np.ndarray, np.ndarray]:
        """Distribution inputs (masked) [N, num_inputs] and values [N]; ``model_pass.backward`` may follow."""
        obs = batch["obs"]
        inputs, values = self.model_pass.forward(self._encoder.encode(obs))
        if self._encoder.has_mask:
            inputs = self.distribution.apply_mask(inputs, self._encoder.mask(obs))
        return inputs, values

    def forward_torch(self, batch: SampleBatch) -> tuple[Tensor, Tensor]:
        """:meth:`forward` as tensors with a graph, for a :meth:`loss`."""
        obs = batch["obs"]
        inputs, values = self.model(self._tensors(obs))
        if self._encoder.has_mask:
            inputs = self.distribution.apply_mask_torch(inputs, self.to_device(self._encoder.mask(obs)))
        return inputs, values

    def to_device(self, array: np.ndarray) -> Tensor:
        """An array as a tensor on the device; shares memory where it can."""
        tensor = as_tensor(array)
        return tensor if self._on_cpu else tensor.to(self.device)

    def column(self, batch: SampleBatch, name: str) -> Tree:
        """A batch's column as tensors on the device."""
        return map_tree(self.to_device, batch[name])

    def _gradients(self, batch: SampleBatch) -> dict[str, float]:
        if batch.count == 0:
            raise ConfigError("cannot learn from a batch of 0 rows")
        self._parameters.grad.zero_()
        stats = self.backward(batch)
        for name, number in stats.items():
            if not math.isfinite(number):
                raise FloatingPointError(f"{name} is {number}; the weights were left as they were")
        return stats

    def _update(self) -> None:
        grad = self._parameters.grad
        norm = math.sqrt(float(grad.dot(grad)))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradient is {norm}; the weights were left as they were")
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            grad.mul_(limit / norm)
        with self._lock:
            self._optimizer.step(grad)
            self.version += 1

    def compute_gradients(self, batch: SampleBatch) -> tuple[Gradients, dict[str, float]]:
        """Gradients of the loss before clipping, and statistics.

        Raises:
            FloatingPointError: a statistic is NaN or infinite (named).
        """
        with self._threads(batch.count):
            stats = self._gradients(batch)
        return self._parameters.get(self._parameters.grad), stats

    def apply_gradients(self, gradients: Gradients) -> None:
        """Clips the gradients' common norm to ``max_grad_norm`` and takes one optimizer step.

        Raises:
            ConfigError: names or shapes that are not the model's.
            FloatingPointError: gradients that are not finite. After either, the weights are as before.
        """
        self._parameters.put(self._parameters.grad, gradients)
        with self._threads(_ROWS_OF_A_STEP):
            self._update()

    def learn(self, batch: SampleBatch) -> dict[str, float]:
        with self._threads(batch.count):
            stats = self._gradients(batch)
            self._update()
        return stats

    def _threads(self, num_rows: int) -> AbstractContextManager[None]:
        """Around work on so many rows: one thread where more would cost more than they do."""
        small = num_rows * self._parameters.values.numel() <= _SMALL
        return one_thread() if small and self._on_cpu and not self._encoder.images else contextlib.nullcontext()

    def set_progress(self, env_steps: int) -> None:
        """Sets the learning rate of a linear schedule."""
        self._env_steps = int(env_steps)
        self._optimizer.learning_rate = self.settings.learning_rate * self.remaining(self.settings.lr_schedule)

    def remaining(self, schedule: str) -> float:
        """The factor of a schedule now: 1 for "constant"; for "linear" from 1 down to 0 over ``schedule_steps``."""
        if schedule == "constant":
            return 1.0
        return max(0.0, 1.0 - self._env_steps / self.settings.schedule_steps)

    def fit_images(self, batches: Iterable[Tree]) -> None:
        """Takes the mean and spread of pixels from observations (trees [K, ...]), for ``image_norm_steps``.

        To be called before learning: what was learnt fits the old ones. The version stays.

        Raises:
            ConfigError: the model normalises no images, or there are no rows; nothing changed.
        """
        trunks = self.model.image_norms() if hasattr(self.model, "image_norms") else []
        if not any(trunks):
            raise ConfigError("image_norm_steps needs images in the observations, and a model that normalises them")
        statistics = [PixelStatistics() for _ in self._encoder.images]
        for obs in batches:
            for pixels, images in zip(statistics, self._encoder.encode(obs).images, strict=True):
                pixels.add(images)
        results = [pixels.result() for pixels in statistics]
        with self._lock:
            for norms in trunks:
                for norm, (mean, deviation) in zip(norms, results, strict=True):
                    norm.set(mean, deviation)

    # Weights and state

    def get_weights(self) -> Weights:
        with self._lock:
            return self._parameters.get(self._parameters.values)

    def set_weights(self, weights: Weights) -> None:
        """Copies the values in.

        Raises:
            ConfigError: names or shapes that are not the model's; nothing changed.
        """
        with self._lock:
            self._parameters.put(self._parameters.values, weights)
            self.version += 1

    def get_state(self) -> dict[str, Any]:
        return {
            "weights": self.get_weights(),
            "optimizer": self._optimizer.get_state(),
            "noise": self._noise.get_state(),
            "version": self.version,
            "env_steps": self._env_steps,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._noise.set_state(state["noise"])
        self._optimizer.set_state(state["optimizer"])
        self.set_weights(state["weights"])
        self.set_progress(int(state["env_steps"]))
        with self._lock:
            self.version = int(state["version"])
            self._numpy_version = -1
