"""The evaluator that joins an env, a policy and a sampler."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rlsample.env.convert import as_base_env
from rlsample.env.env_settings import EnvSettings
from rlsample.env.serving import ServingEnvAdapter
from rlsample.env.spaces import ActionCodec, ObsWriter, empty_columns
from rlsample.errors import ConfigError, SamplerError, unknown_name
from rlsample.evaluation.async_sampler import ActingView, AsyncSampler
from rlsample.evaluation.batch_ends import BatchSink, BatchSource
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.lockstep_sampler import make_sampler
from rlsample.evaluation.metrics import EpisodeMetrics
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.evaluation.sampler import Sampler
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.evaluation.served_sampler import ServedSampler
from rlsample.policy.policy import Gradients, Policy, Weights
from rlsample.policy.policy_group import PolicyGroup
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree, map_tree

__all__ = ["CommonPolicyEvaluator"]

_POLICY_SEED = 1 << 32  # spawn-key address of policy seeds, out of the way of slots


class CommonPolicyEvaluator(PolicyEvaluator):
    """Samples ``env`` with ``policy`` and trains it.

        with CommonPolicyEvaluator("CartPole-v1", PPOPolicy, num_envs=8, rollout_fragment_length=32, seed=0) as ev:
            batch = ev.sample()         # 256 rows
            ev.compute_apply(batch)     # one update

    Args:
        env: anything :func:`~rlsample.env.as_base_env` takes.
        policy: a Policy, or what makes one: ``f(observation_space, action_space, seed=...)``, such as a policy class.
            Several, for an env of several agents: name -> one of these.
        num_envs: slots.
        seed: of envs and policy; None: not reproducible.
        worker_index: this evaluator's number, 0 for the local one; goes into seeds and ids.
        callbacks: your subclass of :class:`~rlsample.evaluation.Callbacks`.
        policy_mapping_fn: where there are several policies, agent -> the name of its policy. Asked once for each
            possible agent.
        policies_to_train: names of those that learn; None: all.
        options: any field of :class:`SamplerSettings` or :class:`~rlsample.env.EnvSettings`.

    Raises:
        ConfigError: an unknown option (the nearest one is named) or values that cannot work.
        EnvError, SpaceError: the env cannot be built or converted. What was built is closed again.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy | Callable[..., Policy] | Mapping[str, Policy | Callable[..., Policy]],
        num_envs: int = 1,
        *,
        seed: int | None = 0,
        worker_index: int = 0,
        callbacks: Callbacks | None = None,
        policy_mapping_fn: Callable[[Any], str] | None = None,
        policies_to_train: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        self.settings, env_settings = _split_options(options)
        self.worker_index = worker_index
        self.callbacks = callbacks
        self._source: BatchSource | None = None
        self._sink: BatchSink | None = None
        self.env = as_base_env(env, num_envs, settings=env_settings, seed=seed, worker_index=worker_index)
        try:
            self._codec = ActionCodec(self.env.action_space)
            self._writer = ObsWriter(self.env.observation_space)
            if isinstance(policy, Mapping):
                self.policy: Policy = self._make_group(policy, policy_mapping_fn, policies_to_train, seed)
            elif policy_mapping_fn is None and policies_to_train is None:
                self.policy = self._make_policy(policy, seed)
            else:
                raise ConfigError(
                    "policy_mapping_fn and policies_to_train are for several policies: give a dict of them"
                )
            self._lock = threading.RLock()  # only contended when sampling runs in a thread of its own
            self._acting_lock = threading.RLock() if self.policy.acts_while_learning else self._lock
            served = isinstance(self.env, ServingEnvAdapter)
            ahead = served if self.settings.sample_async is None else self.settings.sample_async
            acting: Any = ActingView(self.policy, self._acting_lock) if ahead else self.policy
            make: Any = ServedSampler if served else make_sampler
            self.sampler: Sampler = make(self.env, acting, self.settings, worker_index, callbacks)
        except BaseException:
            self.env.close()
            raise
        self.filter = self.sampler.filter
        full = self.settings.sample_queue_full
        impatient = isinstance(self.env, ServingEnvAdapter) and not self.env.env.may_wait
        drop_oldest = impatient if full == "auto" else full == "drop_oldest"
        failed = self.env.stop_serving if isinstance(self.env, ServingEnvAdapter) else None
        self._async = (
            AsyncSampler(self.sampler.sample, self.settings.sample_queue_size, drop_oldest, failed) if ahead else None
        )

    def _make_group(
        self,
        policies: Mapping[str, Any],
        mapping: Callable[[Any], str] | None,
        to_train: Collection[str] | None,
        seed: int | None,
    ) -> PolicyGroup:
        agents = getattr(self.env, "agents", None)
        if agents is None or mapping is None:
            why = "policy_mapping_fn says which agent has which" if agents is not None else "this env has one agent"
            raise ConfigError(f"several policies ({', '.join(map(str, policies))}): {why}; give one policy, or that")
        names = [mapping(agent) for agent in agents]
        made = {name: self._make_policy(one, seed, number) for number, (name, one) in enumerate(policies.items())}
        return PolicyGroup(made, names, to_train)

    def _make_policy(self, policy: Any, seed: int | None, *number: int) -> Policy:
        if isinstance(policy, Policy):
            return policy
        if not callable(policy):
            raise ConfigError(f"policy must be a Policy or make one, not {type(policy).__name__}")
        made = policy(
            self.env.observation_space, self.env.action_space, seed=_policy_seed(seed, self.worker_index, *number)
        )
        if not isinstance(made, Policy):
            raise ConfigError(f"policy() returned {type(made).__name__}, expected a Policy")
        return made

    # ------------------------------------------------------------------ sampling

    def sample(self) -> SampleBatch:
        """One batch; see :meth:`Sampler.sample`. Where sampling has a thread of its own, it was begun before this call.

        Columns: obs, actions, rewards, terminated, truncated, the policy's extra columns, eps_id, t, env_id,
        fragment_id, policy_version, and what the policy's postprocess adds. The arrays are the caller's.

        Raises:
            EnvFailedError: a sub-env failed past its restart budget.
            SamplerError: the sampling thread failed (the error is its cause), or this evaluator is closed.
        """
        batch = self._sampled() if self._source is None else next(self._source, None)
        if batch is None:
            raise SamplerError("the source of batches has ended; give it more passes (repeat)")
        if self.settings.postprocess:
            with self._lock:
                batch = self.policy.postprocess(batch)
        if self.callbacks is not None:
            self.callbacks.on_sample_end(self, batch)
        return batch

    def _sampled(self) -> SampleBatch:
        batch = self.sampler.sample() if self._async is None else self._async.get()
        if self._sink is not None:
            self._sink.write(batch)
        return batch

    def record_to(self, sink: BatchSink) -> None:
        """From now on ``sink`` gets each sampled batch before the policy's postprocess. Closed with the evaluator."""
        self._sink = sink

    def read_from(self, make_source: Callable[[Callable[[], SampleBatch]], BatchSource]) -> None:
        """From now on :meth:`sample` gives what a source gives, with the policy's postprocess.

        Args:
            make_source: is given the function that samples the env, for a source that mixes its batches in; the source
                is closed with the evaluator. When it ends, :meth:`sample` raises SamplerError.
        """
        self._source = make_source(self._sampled)

    def compute_action(self, obs: Any, explore: bool = False, agent: Any = None) -> Any:
        """The action for one observation of the env, in the form ``env.step`` takes.

        The observation passes the filter, whose statistics stay as they are.

        Args:
            agent: whose observation it is, where there are several policies.

        Raises:
            EnvFailedError: an observation that does not fit the space.
            ConfigError: an unknown agent, or none where there are several policies.
        """
        column = empty_columns(self.env.observation_space, (1,))
        self._writer.write(column, 0, obs, 0, None)
        with self._acting_lock:
            seen = self.filter(column, update=False)
            if agent is None:
                out = self.policy.act(seen, explore)
            else:
                out = self.policy.act_for(np.array([self._agent_index(agent)]), seen, explore)
            return self._codec.check_and_split(self.sampler.to_env(out.actions), np.zeros(1, np.int64))[0]

    def compute_actions(self, obs: Tree, explore: bool = False) -> Tree:
        """The actions for K observations (tree [K, ...]) as the env gets them, also beside sampling. Copied."""
        with self._acting_lock:  # a policy may use its arrays again when it acts the next time
            out = self.policy.act(self.filter(obs, update=False), explore)
            return map_tree(np.copy, self.sampler.to_env(out.actions))

    def _agent_index(self, agent: Any) -> int:
        agents = getattr(self.env, "agents", None) or ()
        if agent not in agents:
            raise unknown_name("agent", str(agent), map(str, agents))
        return list(agents).index(agent)

    def filtered(self, obs: Tree) -> Tree:
        """What the policy sees of observations [K, ...]; the filter's statistics stay as they are."""
        return self.filter(obs, update=False)

    def get_metrics(self) -> list[EpisodeMetrics]:
        return self.sampler.episodes.drain()

    def get_timers(self) -> dict[str, float]:
        """Milliseconds per poll since the last call: ``sampler/env_ms``, ``infer_ms``, ``processing_ms``, and with all
        else and waiting ``elapsed_ms``; and ``sampler/polls``.

        With ``sample_queue_full="drop_oldest"`` also ``sampler/rows_dropped``.
        """
        timers = self.sampler.timers.drain()
        if self._async is not None and self._async.drops:
            timers["sampler/rows_dropped"] = self._async.take_rows_dropped()
        return timers

    # ------------------------------------------------------------------ learning

    def compute_gradients(self, samples: SampleBatch) -> tuple[Gradients, dict[str, Any]]:
        with self._lock:
            return self.policy.compute_gradients(samples)

    def apply_gradients(self, gradients: Gradients) -> None:
        with self._lock:
            self.policy.apply_gradients(gradients)

    def compute_apply(self, samples: SampleBatch) -> dict[str, Any]:
        with self._lock:
            return self.policy.learn(samples)

    def get_weights(self) -> Weights:
        with self._lock:
            return self.policy.get_weights()

    def set_weights(self, weights: Weights) -> None:
        with self._lock:
            self.policy.set_weights(weights)

    def set_progress(self, env_steps: int) -> None:
        with self._lock:
            self.policy.set_progress(env_steps)

    # ------------------------------------------------------------------ lifetime

    def get_state(self) -> dict[str, Any]:
        """Policy, filter and, where the env gives its state (see :meth:`Sampler.get_state`), the running episodes.

        With all three, a resumed evaluator continues bit for bit. Without the episodes it starts new ones.
        """
        with self._lock, self._acting_lock:
            steps = self._source is None or self._source.samples
            sampler = self.sampler.get_state() if steps and not self._async else None
            state = {"policy": self.policy.get_state(), "filter": self.filter.get_state(), "sampler": sampler}
            return state if self._source is None else {**state, "source": self._source.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        with self._lock, self._acting_lock:
            self.policy.set_state(state["policy"])
            self.filter.set_state(state["filter"])
            if state["sampler"] is not None:
                self.sampler.set_state(state["sampler"])
            if self._source is not None and "source" in state:
                self._source.set_state(state["source"])

    def close(self) -> None:
        try:
            self.env.close()
            if self._async is not None:
                self._async.close()
        finally:
            for end in (self._source, self._sink):
                if end is not None:
                    end.close()


def _split_options(options: Mapping[str, Any]) -> tuple[SamplerSettings, EnvSettings]:
    sampler_names = {f.name for f in dataclasses.fields(SamplerSettings)}
    env_names = {f.name for f in dataclasses.fields(EnvSettings)}
    for name in options:
        if name not in sampler_names | env_names:
            raise unknown_name("option", name, sampler_names | env_names)
    return (
        SamplerSettings(**{k: v for k, v in options.items() if k in sampler_names}),
        EnvSettings(**{k: v for k, v in options.items() if k in env_names}),
    )


def _policy_seed(seed: int | None, worker_index: int, *number: int) -> int | None:
    if seed is None:
        return None
    child = np.random.SeedSequence(int(seed), spawn_key=(_POLICY_SEED, worker_index, *number))
    return int(child.generate_state(1)[0])
