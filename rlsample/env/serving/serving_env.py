"""An environment that is not stepped but asks: the user's thread calls, the policy answers.

class Shop(ServingEnv):
    def run(self):
        while True:
            self.start_episode()
            obs, ended = shop.open(), False
            while not ended:
                obs, profit, ended = shop.sell_at(self.get_action(obs))
                self.log_returns(profit)
            self.end_episode(obs)

with CommonPolicyEvaluator(Shop(Box(...), Discrete(5)), PPOPolicy) as evaluator:
    batch = evaluator.sample()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import gymnasium

from rlsample.env.serving.episode_desk import EpisodeDesk
from rlsample.env.serving.serving_settings import ServingSettings
from rlsample.errors import ServingError

__all__ = ["ServingEnv"]


class ServingEnv(threading.Thread):
    """A daemon thread whose ``run()``, which you write, plays episodes and asks for actions.

    The evaluator it is given to starts it with the first ``sample()``. ``run()`` may use threads of its own; every call
    below may come from any thread, but one episode takes one call at a time. Without a ``run()`` of yours it only
    waits: then all calls come from threads that you have anyway, such as those of a server.

    Calls take the episode_id last. It may be left out where the calling thread has exactly one open episode of those
    it started. Every wrong use raises ServingError, every wrong value SpaceError, in the caller; nothing was sent then,
    and the episode goes on.

    An episode's rows: each get_action or log_action begins one, with its observation and action; the sum of
    what log_returns gives until the next one is its reward, and the observation of the next one (or of end_episode) is
    its next observation.

    All threads share the interpreter's lock. Answers come while the learner computes in torch or large numpy calls,
    which let go of it; one that is busy in Python itself gives it up only every ``sys.getswitchinterval()``: 5 ms for
    the whole process, so it is left as it is. Lower it if you have such a learner and clients in a hurry.

    When ``run()`` returns or raises, serving is over: other threads' calls raise, what was queued is still sampled, and
    then ``sample()`` raises (see :class:`~rlsample.evaluation.served_sampler.ServedSampler`).

    Attributes:
        may_wait: False: clients in the world outside do not wait for a busy learner, so that with
            ``sample_queue_full="auto"`` samples are dropped. A subclass whose ``run()`` can wait says True.

    Args:
        observation_space, action_space: of fixed size, as for every env.
        max_concurrent: most episodes open at a time.
        settings: see :class:`ServingSettings`.

    Raises:
        SpaceError, ConfigError: spaces or numbers that cannot work.
    """

    may_wait = False

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_concurrent: int = 100,
        settings: ServingSettings | None = None,
    ) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.observation_space, self.action_space = observation_space, action_space
        self.settings = settings or ServingSettings()
        self.desk = self._make_desk(max_concurrent)
        self._start_once = threading.Lock()

    def _make_desk(self, max_concurrent: int) -> EpisodeDesk:
        return EpisodeDesk(self.observation_space, self.action_space, max_concurrent, self.settings)

    def run(self) -> None:
        """Yours: plays episodes. This one returns when the env is closed."""
        self.desk.registry.over.wait()

    @property
    def over(self) -> bool:
        """No more calls are taken: closed, or ``run()`` has ended. For loops in ``run()`` that make no calls."""
        return self.desk.registry.over.is_set()

    @property
    def open_episodes(self) -> list[str]:
        """Ids of the episodes that are open now."""
        return list(self.desk.registry.open)

    # ------------------------------------------------------------------ the five calls

    def start_episode(
        self, episode_id: str | None = None, training_enabled: bool = True, timeout_s: float | None = None
    ) -> str:
        """Opens an episode and returns its id.

        Args:
            episode_id: your own, of no episode that is open; None: a new one is made.
            training_enabled: False: actions are answered and returns counted, but no rows are kept.
            timeout_s: how long to wait for a place; None: ``settings.timeout_s``.

        Raises:
            ServingError: the id is open already, there is no place, or serving is over.
        """
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        return self.desk.registry.start(episode_id, training_enabled, limit_s).id

    def get_action(self, obs: Any, episode_id: str | None = None, timeout_s: float | None = None) -> Any:
        """The policy's action for an observation, in the form ``env.step`` takes. Waits for it.

        Args:
            obs: one observation; copied. Shape, dtype and finiteness are checked, bounds are not.
            timeout_s: None: ``settings.timeout_s``.

        Raises:
            SpaceError: the observation does not fit the space.
            ServingError: no such open episode; it is in use by another thread; no answer in time (the question stands
                then: ask again with the same observation, or end the episode, which then ends, truncated, at that
                observation); the policy failed (the episode is closed); serving is over.
        """
        desk = self.desk
        return desk.ask(desk.registry.find(episode_id, obs), obs, timeout_s)

    def log_action(
        self, obs: Any, action: Any, episode_id: str | None = None, action_logp: float | None = None
    ) -> None:
        """Records an action that was chosen elsewhere. Does not wait, unless ``max_queued_rows`` are on their way.

        Args:
            action: as ``env.step`` takes it, within the space.
            action_logp: its log-probability where it was chosen. None: the row holds NaN, which policies that weigh by
                it (PPO, IMPALA) refuse when they learn.

        Raises:
            SpaceError: a value does not fit its space.
            ServingError: as for :meth:`get_action`; or no room in time.
        """
        self.desk.log(self.desk.registry.find(episode_id, obs), obs, action, action_logp)

    def log_returns(self, reward: Any, info: dict[str, Any] | None = None, episode_id: str | None = None) -> None:
        """Adds to the reward of the episode's last action. Before the first action there is none: nothing is counted.

        Args:
            reward: a finite number, 0-d or of shape (1,).
            info: for callbacks; a later one of the same step replaces it.

        Raises:
            ServingError: the reward is no finite number; or as for :meth:`get_action`.
        """
        self.desk.add_reward(self.desk.registry.find(episode_id, reward), reward, info)

    def end_episode(self, obs: Any, episode_id: str | None = None, truncated: bool = False) -> None:
        """Ends the episode. Log the last reward before. Does not wait; the id may be used again.

        An episode without any action leaves no rows and is not counted.

        Args:
            obs: the final observation.
            truncated: it was cut off: the value of ``obs`` counts. False: it terminated.

        Raises:
            SpaceError: the observation does not fit the space; the episode is still open.
            ServingError: no such open episode.
        """
        self.desk.end(self.desk.registry.find(episode_id, obs), obs, truncated)

    def request_action(self, obs: Any, episode_id: str | None, on_answer: Callable[[Any], None]) -> None:
        """As :meth:`get_action`, but returns at once and hands over the answer by a call.

        Args:
            on_answer: called once with the action, or with a ServingError, in the sampling thread: it must neither wait
                nor raise nor call this env, but pass the answer on (``loop.call_soon_threadsafe``).
        """
        self.desk.ask_later(self.desk.registry.find(episode_id, obs), obs, on_answer)

    # ------------------------------------------------------------------ lifetime

    def interrupt(self) -> None:
        """Called once when the env is closed, after all calls were ended. Override it to end a ``run()`` that waits for
        something else."""

    def start(self) -> None:
        """Starts ``run()``; the adapter does it. What ``run()`` raises is kept for ``sample()``."""
        with self._start_once:
            if self.ident is not None:
                raise ServingError("a ServingEnv serves one evaluator, once: make another one")
            user_run = self.run

            def run() -> None:
                del self.run  # breaks the cycle; the class's own is back
                try:
                    user_run()
                except BaseException as e:
                    self.desk.stop(f"the serving thread {self.name} failed: {type(e).__name__}: {e}", e)
                else:
                    self.desk.stop(f"the serving thread {self.name} has ended: run() returned")

            self.run = run  # type: ignore[method-assign]
            super().start()
