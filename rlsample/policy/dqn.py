"""Deep Q-learning: double, duelling, over n steps (Mnih et al. 2015, doi:10.1038/nature14236)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from rlsample.errors import ConfigError, SpaceError
from rlsample.policy.distributions import MASKED_LOGIT
from rlsample.policy.flat_parameters import FlatParameters
from rlsample.policy.model_passes import ChainPass, ModelPass, TorchPass
from rlsample.policy.n_step import compute_n_step
from rlsample.policy.noise import NoiseStream
from rlsample.policy.policy import ActOutput, Gradients
from rlsample.policy.seeded_draws import seeded_draws
from rlsample.policy.torch_policy import TorchPolicy
from rlsample.policy.torch_settings import TorchSettings
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.settings import option
from rlsample.tree import Tree, gather, num_rows

__all__ = ["DQNPolicy", "DQNSettings"]

_REPLAY_ID = "replay_id"


@dataclass(frozen=True)
class DQNSettings(TorchSettings):
    """Options of :class:`DQNPolicy`."""

    learning_rate: float = option(5e-4, "Step size of the optimizer.")
    max_grad_norm: float | None = option(40.0, "Gradients are scaled down to this common norm; null: never.")
    gamma: float = option(0.99, "Discount.")
    n_step: int = option(1, "Rewards that a target sums before it goes on with a value.")
    double_q: bool = option(True, "The net that learns chooses the next action, the target net says its value.")
    dueling: bool = option(True, "Q is the value net plus the advantages less their mean; false: the advantages alone.")
    target_update_interval: int = option(500, "Updates after which the target net takes over the weights.")
    initial_epsilon: float = option(1.0, "Part of the actions that are random at first.")
    final_epsilon: float = option(0.02, "The same after epsilon_steps.")
    epsilon_steps: int = option(10_000, "Env steps over which epsilon goes from its first to its final value.")
    worker_side_prioritization: bool = option(False, "Samples bring the priorities of their rows along (Ape-X).")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_step", "target_update_interval", "epsilon_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("gamma", "initial_epsilon", "final_epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], not {getattr(self, name)}")


class _Q(NamedTuple):
    """float32 [N, choices]: values, ``MASKED_LOGIT`` where forbidden; and bool, what is allowed (None: everything)."""

    values: np.ndarray
    allowed: np.ndarray | None


class DQNPolicy(TorchPolicy):
    """Q-learning with epsilon-greedy actions, for Discrete action spaces.

    The model is that of the actor-critics: its policy net gives advantages, its value net V.

    A batch for learning needs obs, actions, next_obs, and what :meth:`postprocess` adds; ``weights`` of prioritised
    replay are used where they are there. The loss is the mean of the rows' weights times the Huber loss of their TD
    errors. To a batch from a replay buffer (one with ``replay_id``) the statistics add ``td_errors``, float32[N].

    Statistics: loss, td_error_mean (absolute), q_mean, epsilon.

    Attributes:
        epsilon: part of the actions that are random now.

    Raises:
        SpaceError: the action space is not Discrete.
    """

    settings: DQNSettings

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: DQNSettings | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(action_space, gymnasium.spaces.Discrete):
            raise SpaceError(f"DQN chooses among the actions of a Discrete space, not {action_space}")
        super().__init__(observation_space, action_space, DQNSettings() if settings is None else settings, seed)
        self.extra_columns = {"action_logp": ((), np.float32)}
        self._num_choices, self._start = int(action_space.n), int(action_space.start)
        noise_seed = np.random.SeedSequence(seed).spawn(2)[1]
        self._noise = NoiseStream((("gumbel", self._num_choices), ("logistic", 1)), noise_seed)
        self._fixed_epsilon: float | None = None
        self.epsilon = self.settings.initial_epsilon
        self._num_updates = 0
        self._td_errors = np.zeros(0, np.float32)
        with seeded_draws(None):
            target = self.make_model().to(self.device)
        self._target = FlatParameters(target)
        self._target_pass: ModelPass = TorchPass(target, self.device)
        if isinstance(self.model_pass, ChainPass):
            chains = target.chains()
            assert chains is not None
            self._target_pass = ChainPass(chains, None)
        self._sync_target()

    # Acting

    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        """The action of the largest Q, or with probability epsilon any that is allowed."""
        greedy = super().act(obs, explore=False).actions  # the largest advantage is the largest Q
        epsilon = self.epsilon if explore else 0.0
        actions, num_rows = greedy, len(greedy)
        allowed = self._encoder.mask(obs) != 0 if self._encoder.has_mask else None
        if explore:
            noise = self._noise.take(num_rows)
            threshold = math.log(epsilon / (1 - epsilon)) if 0 < epsilon < 1 else math.inf * (epsilon - 0.5)
            random = noise[:, self._num_choices] < threshold
            if random.any():
                draws = noise[:, : self._num_choices]
                if allowed is not None:
                    draws = np.where(allowed, draws, -np.inf)
                actions = np.where(random, draws.argmax(1) + self._start, greedy).astype(greedy.dtype)
        return ActOutput(actions, {"action_logp": self._logp(actions, greedy, epsilon, allowed)})

    def logp(self, obs: Tree, actions: Tree) -> np.ndarray:
        """Log-probability of given actions under the epsilon of now: float32[K], -inf where they are never chosen."""
        allowed = self._encoder.mask(obs) != 0 if self._encoder.has_mask else None
        logp = self._logp(actions, super().act(obs, explore=False).actions, self.epsilon, allowed)
        if allowed is not None:
            logp[~allowed[np.arange(len(logp)), actions - self._start]] = -np.inf
        return logp

    def _logp(self, actions: np.ndarray, greedy: np.ndarray, epsilon: float, allowed: np.ndarray | None) -> np.ndarray:
        choices = self._num_choices if allowed is None else allowed.sum(1)
        with np.errstate(divide="ignore"):
            return np.log(epsilon / choices + (1 - epsilon) * (actions == greedy)).astype(np.float32)

    def values(self, obs: Tree) -> np.ndarray:
        """The largest Q of K observations: float32[K], a fresh array."""
        with self._lock, self._threads(num_rows(obs)), torch.inference_mode():
            advantages, values = self.model(self._tensors(obs))
            return self._q(obs, advantages.cpu().numpy(), values.cpu().numpy()).values.max(1)

    def fix_epsilon(self, epsilon: float) -> None:
        """From now on epsilon is this, whatever the schedule says."""
        if not 0 <= epsilon <= 1:
            raise ConfigError(f"epsilon must be in [0, 1], not {epsilon}")
        self._fixed_epsilon = self.epsilon = float(epsilon)

    def set_progress(self, env_steps: int) -> None:
        """Sets epsilon, and the learning rate of a linear schedule."""
        super().set_progress(env_steps)
        if self._fixed_epsilon is None:
            s = self.settings
            self.epsilon = s.initial_epsilon + (s.final_epsilon - s.initial_epsilon) * min(
                1.0, env_steps / s.epsilon_steps
            )

    # Targets

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds ``nstep_returns`` and ``nstep_discounts``, float32[N]; ``next_obs`` is the one after the n steps.

        With ``worker_side_prioritization`` also ``priorities``: absolute TD errors by the weights of now.
        """
        nxt = batch.next_obs_source
        derived = nxt is not None and nxt.source is None and "next_obs" not in batch.keys()  # noqa: SIM118
        ends = np.ones(batch.count, bool)
        if derived and nxt is not None:
            ends = nxt.index != np.arange(1, batch.count + 1)
        elif self.settings.n_step > 1:
            ends[:-1] = False
            ends[batch.sequences(max(1, batch.count)).starts[1:] - 1] = True
        steps = compute_n_step(batch["rewards"], batch["terminated"], ends, self.settings.n_step, self.settings.gamma)
        columns = dict(batch.items())
        columns["nstep_returns"], columns["nstep_discounts"] = steps.returns, steps.discounts
        if derived and nxt is not None:
            batch = SampleBatch(columns, NextObs(nxt.index[steps.last], nxt.extra), batch.fragment_lengths)
        else:
            columns["next_obs"] = gather(batch["next_obs"], steps.last)
            batch = SampleBatch(columns, None, batch.fragment_lengths)
        if self.settings.worker_side_prioritization:
            targets = self._targets(batch, self.model_pass)
            q = self._run(self.model_pass, batch["obs"]).values
            batch["priorities"] = np.abs(q[np.arange(batch.count), self._chosen(batch)] - targets)
        return batch

    def _targets(self, batch: SampleBatch, target_pass: ModelPass) -> np.ndarray:
        next_obs = batch["next_obs"]
        q = self._run(target_pass, next_obs).values
        best = self._run(self.model_pass, next_obs).values if self.settings.double_q else q
        return batch["nstep_returns"] + batch["nstep_discounts"] * q[np.arange(batch.count), best.argmax(1)]

    def _chosen(self, batch: SampleBatch) -> np.ndarray:
        return batch["actions"] - self._start

    @torch.no_grad()
    def _run(self, model_pass: ModelPass, obs: Tree) -> _Q:
        return self._q(obs, *model_pass.forward(self._encoder.encode(obs)))

    def _q(self, obs: Tree, advantages: np.ndarray, values: np.ndarray) -> _Q:
        allowed = None
        if self._encoder.has_mask:
            allowed = self._encoder.mask(obs) != 0
            allowed = allowed | ~allowed.any(1)[:, None]  # a final observation may allow nothing; its value counts 0
        if self.settings.dueling:
            if allowed is None:
                mean = advantages.mean(1, keepdims=True)
            else:
                mean = np.where(allowed, advantages, 0).sum(1, keepdims=True) / allowed.sum(1, keepdims=True)
            advantages = values[:, None] + advantages - mean
        if allowed is not None:
            advantages = np.where(allowed, advantages, MASKED_LOGIT)
        return _Q(advantages.astype(np.float32, copy=False), allowed)

    # Learning

    def backward(self, batch: SampleBatch) -> dict[str, float]:
        targets = self._targets(batch, self._target_pass)
        advantages, values = self.model_pass.forward(self._encoder.encode(batch["obs"]))
        q, allowed = self._q(batch["obs"], advantages, values)
        rows, chosen = np.arange(batch.count), self._chosen(batch)
        errors = q[rows, chosen] - targets
        weights = batch.get("weights", np.float32(1))
        size = np.abs(errors)
        huber = np.where(size <= 1, 0.5 * errors * errors, size - 0.5)
        d_q = (weights * np.clip(errors, -1, 1) / batch.count).astype(np.float32)
        d_advantages = np.zeros((batch.count, self._num_choices), np.float32)
        d_advantages[rows, chosen] = d_q
        d_values = np.zeros(batch.count, np.float32)
        if self.settings.dueling:
            everything = np.ones_like(d_advantages)
            share = everything / self._num_choices if allowed is None else allowed / allowed.sum(1, keepdims=True)
            d_advantages -= (share * d_q[:, None]).astype(np.float32)
            d_values = d_q
        self.model_pass.backward(d_advantages, d_values)
        self._td_errors = errors.astype(np.float32, copy=False)
        return {
            "loss": float((weights * huber).mean()),
            "td_error_mean": float(size.mean()),
            "q_mean": float(q[rows, chosen].mean()),
            "epsilon": self.epsilon,
        }

    def learn(self, batch: SampleBatch) -> dict[str, float]:
        return self._with_errors(super().learn(batch), batch)

    def compute_gradients(self, batch: SampleBatch) -> tuple[Gradients, dict[str, float]]:
        gradients, stats = super().compute_gradients(batch)
        return gradients, self._with_errors(stats, batch)

    def _with_errors(self, stats: dict[str, float], batch: SampleBatch) -> dict[str, Any]:
        return {**stats, "td_errors": self._td_errors} if _REPLAY_ID in batch else stats

    def _update(self) -> None:
        super()._update()
        self._num_updates += 1
        if self._num_updates % self.settings.target_update_interval == 0:
            self._sync_target()

    def _sync_target(self) -> None:
        with torch.no_grad():
            self._target.values.copy_(self._parameters.values)

    def fit_images(self, batches: Iterable[Tree]) -> None:
        """For the target net too."""
        super().fit_images(batches)
        self._sync_target()

    # State

    def get_state(self) -> dict[str, Any]:
        target = self._target.get(self._target.values)
        return {**super().get_state(), "target": target, "num_updates": self._num_updates}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._target.put(self._target.values, state["target"])
        self._num_updates = int(state["num_updates"])
