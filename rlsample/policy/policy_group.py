"""Several policies behind the contract of one: each acts for its agents, and learns from their rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlsample.errors import ConfigError, unknown_name
from rlsample.policy.policy import ActOutput, Gradients, Policy, Weights
from rlsample.sample_batch import AGENT_ID, OBS, NextObs, SampleBatch
from rlsample.tree import Tree, assign, gather, map_tree

__all__ = ["PolicyGroup"]

_TD_ERRORS = "td_errors"  # of each row, for its priority in a replay buffer
_NO_AGENTS = "several policies act here: which one it is depends on the agent, and nothing says which agent this is"


class PolicyGroup(Policy):
    """Policies by name, and the one of each agent.

    Weights and gradients have the policy's name before the parameter's, ``red/actor.0.weight``, statistics too. A batch
    says by its column ``agent_id`` whose row is whose; :meth:`postprocess` puts the rows of a policy together, in the
    order of the policies, and keeps the order of each one's rows.

    Args:
        policies: name -> policy, all of the same spaces and extra columns; a name has no ``/``.
        names: the policy of each agent, by its index.
        to_train: names of the policies that learn; None: all. Rows of the others are sampled and left aside.

    Attributes:
        policies: as given; ``trained``: those that learn.

    Raises:
        ConfigError: no policies, an unknown name, or policies that do not go together.
    """

    def __init__(
        self, policies: Mapping[str, Policy], names: Sequence[str], to_train: Collection[str] | None = None
    ) -> None:
        self.policies = dict(policies)
        if not self.policies or any(not isinstance(name, str) or "/" in name or not name for name in self.policies):
            raise ConfigError(f"policies need names, without a slash, at least one; got {list(self.policies)}")
        if isinstance(to_train, str):
            raise ConfigError(f"policies_to_train is a list of names, such as [{to_train!r}]")
        for name in (*names, *(to_train or ())):
            if name not in self.policies:
                raise unknown_name("policy", str(name), self.policies)
        self.trained = {name: p for name, p in self.policies.items() if to_train is None or name in to_train}
        self._order = list(self.policies)
        self._of_agent = np.array([self._order.index(name) for name in names], np.int64)
        first = next(iter(self.policies.values()))
        for name, policy in self.policies.items():
            for kind in ("observation_space", "action_space"):
                its, firsts = getattr(policy, kind), getattr(first, kind)
                if its != firsts:
                    raise ConfigError(
                        f"policy {name!r} has the {kind} {its}, {self._order[0]!r} {firsts}: all agents of an env have "
                        "the same, padded where need be"
                    )
            if dict(policy.extra_columns) != dict(first.extra_columns):
                raise ConfigError(
                    f"policy {name!r} adds the columns {dict(policy.extra_columns)}, {self._order[0]!r} "
                    f"{dict(first.extra_columns)}: the rows of all are columns of one batch"
                )
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.extra_columns = first.extra_columns
        self.acts_while_learning = all(policy.acts_while_learning for policy in self.policies.values())
        self.version = 0

    # ------------------------------------------------------------------ acting

    def act(self, obs: Tree, explore: bool = True) -> ActOutput:
        """Not without agents.

        Raises:
            ConfigError: always; see :meth:`act_for`.
        """
        raise ConfigError(f"{_NO_AGENTS}; ask one of evaluator.policy.policies, or use act_for")

    def values(self, obs: Tree) -> np.ndarray:
        """As :meth:`act`."""
        raise ConfigError(f"{_NO_AGENTS}; ask one of evaluator.policy.policies")

    def act_for(self, agents: np.ndarray, obs: Tree, explore: bool = True) -> ActOutput:
        """One pass of each policy that is needed."""
        which = self._of_agent[agents]
        present = np.unique(which).tolist()
        if len(present) == 1:
            return self._policy(present[0]).act(obs, explore)
        actions: Tree = None
        extras: dict[str, np.ndarray] = {}
        for number in present:
            rows = np.flatnonzero(which == number)
            out = self._policy(number).act(gather(obs, rows), explore)
            if actions is None:
                actions = map_tree(lambda leaf: np.empty((len(which), *leaf.shape[1:]), leaf.dtype), out.actions)
                extras = {name: np.empty((len(which), *x.shape[1:]), x.dtype) for name, x in out.extras.items()}
            assign(actions, rows, out.actions)
            for name, values in out.extras.items():
                extras[name][rows] = values
        return ActOutput(actions, extras)

    def _policy(self, number: int) -> Policy:
        return self.policies[self._order[number]]

    # ------------------------------------------------------------------ learning

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Each policy's own, of its rows, with next observations and fragments as they were."""
        which = self._which(batch)
        parts = [
            self._policy(number).postprocess(_rows_of(batch, which == number)) for number in np.unique(which).tolist()
        ]
        return parts[0] if len(parts) == 1 else SampleBatch.concat(parts)

    def compute_gradients(self, batch: SampleBatch) -> tuple[Gradients, dict[str, float]]:
        gradients: Gradients = {}
        stats: dict[str, float] = {}
        for name, policy, part, _ in self._parts(batch):
            found, told = policy.compute_gradients(part)
            gradients.update(_named(name, found))
            stats.update(_named(name, told))
        return gradients, stats

    def apply_gradients(self, gradients: Gradients) -> None:
        """One step of each policy that has gradients here.

        Raises:
            ConfigError: gradients of a policy that is not there or does not learn. Nothing was done.
        """
        parts = self._by_policy(gradients)
        for name in parts:
            if name not in self.trained:
                raise ConfigError(f"gradients of policy {name!r}, which does not learn here")
        for name, part in parts.items():
            self.trained[name].apply_gradients(part)
        self.version += 1

    def learn(self, batch: SampleBatch) -> dict[str, float]:
        """Each policy's update on its rows. ``td_errors`` of all are one array again; 0 where nothing was learnt."""
        stats: dict[str, Any] = {}
        for name, policy, part, mine in self._parts(batch):
            told: dict[str, Any] = dict(policy.learn(part))
            if _TD_ERRORS in told:
                stats.setdefault(_TD_ERRORS, np.zeros(batch.count, np.float32))[mine] = told.pop(_TD_ERRORS)
            stats.update(_named(name, told))
        self.version += 1
        return stats

    def _parts(self, batch: SampleBatch) -> Iterator[tuple[str, Policy, SampleBatch, np.ndarray]]:
        """The rows of each policy that learns, where there are any, and which they are: bool[N]."""
        which = self._which(batch)
        for number, name in enumerate(self._order):
            rows = which == number
            if name in self.trained and rows.any():
                yield name, self.trained[name], _rows_of(batch, rows), rows

    def _which(self, batch: SampleBatch) -> np.ndarray:
        if AGENT_ID not in batch:
            raise ConfigError(
                f"several policies learn from rows by their column {AGENT_ID!r}; this batch has {', '.join(batch)}"
            )
        agents: np.ndarray = batch[AGENT_ID]
        return self._of_agent[agents]

    # ------------------------------------------------------------------ weights and state

    def get_weights(self) -> Weights:
        weights: Weights = {}
        for name, policy in self.policies.items():
            weights.update(_named(name, policy.get_weights()))
        return weights

    def set_weights(self, weights: Weights) -> None:
        """Copies the values in, policy by policy.

        Raises:
            ConfigError: a policy that is not there (nothing changed), or what one of them refuses.
        """
        parts = self._by_policy(weights)
        for name, policy in self.policies.items():
            policy.set_weights(parts.get(name, {}))
        self.version += 1

    def _by_policy(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, parameter = key.partition("/")
            if name not in self.policies:
                raise unknown_name("policy", name, self.policies)
            parts.setdefault(name, {})[parameter] = value
        return parts

    def get_state(self) -> dict[str, Any]:
        states = {name: policy.get_state() for name, policy in self.policies.items()}
        return {"policies": states, "version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if set(state["policies"]) != set(self.policies):
            raise ConfigError(f"the state is of the policies {list(state['policies'])}, here are {self._order}")
        for name, policy in self.policies.items():
            policy.set_state(state["policies"][name])
        self.version = int(state["version"])

    def set_progress(self, env_steps: int) -> None:
        for policy in self.policies.values():
            policy.set_progress(env_steps)


def _named(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}/{key}": value for key, value in values.items()}


def _rows_of(batch: SampleBatch, mine: np.ndarray) -> SampleBatch:
    """The rows of a mask, which holds whole lanes: as if they had been sampled alone."""
    if mine.all():
        return batch
    rows, nxt, lengths = np.flatnonzero(mine), batch.next_obs_source, batch.fragment_lengths
    columns = {name: gather(column, rows) for name, column in batch.items()}
    if nxt is not None and nxt.source is None:
        index = nxt.index[rows]
        own = index >= 0
        assert mine[index[own]].all()
        index[own] = (np.cumsum(mine) - 1)[index[own]]
        nxt = NextObs(index, nxt.extra).detach(columns.get(OBS))
    elif nxt is not None:
        nxt = NextObs(nxt.index[rows], nxt.extra, nxt.source)
    if lengths is not None:
        starts = np.cumsum(lengths) - lengths
        lengths = lengths[mine[np.minimum(starts, batch.count - 1)]]
    return SampleBatch(columns, nxt, lengths)
