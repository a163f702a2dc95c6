"""An environment in another process, or on another machine: it asks a policy over HTTP, which learns from its play.

    python examples/http_client.py [--quick] [--local]

This process trains and serves; two others play CartPole through a PolicyClient and know nothing but its address. With
--local they pull the weights, act by themselves and upload what they played. Instead of the server here,
`rlsample serve --algo ppo --env-spaces CartPole-v1 --train` would do.
"""

import contextlib
import functools
import subprocess
import sys

import gymnasium

from rlsample.env import ServingEnv
from rlsample.errors import EpisodeLostError, ServingError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet, MetricsWindow
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.serving import ClientSettings, HttpSettings, PolicyClient, PolicyServer

PLAYERS = 2


def play(address, seed, inference):
    """What a client does: the loop of any Gymnasium env, with the policy elsewhere."""
    cartpole = gymnasium.make("CartPole-v1")
    obs, _ = cartpole.reset(seed=seed)
    with PolicyClient(address, settings=ClientSettings(inference=inference, timeout_s=10)) as client:
        while True:
            with contextlib.suppress(EpisodeLostError):  # the server was restarted: begin a new episode
                client.start_episode()
                terminated = truncated = False
                while not (terminated or truncated):
                    obs, reward, terminated, truncated, _ = cartpole.step(client.get_action(obs))
                    client.log_returns(reward)
                client.end_episode(obs, truncated=truncated and not terminated)
            obs, _ = cartpole.reset()


def serve(iterations, inference):
    """Trains on what comes in; the clients are processes of their own."""
    from rlsample.policy import PPOPolicy, PPOSettings  # loads torch, which players need not

    game = gymnasium.make("CartPole-v1")
    places = 2 * PLAYERS  # an ended episode keeps its place until it is sampled
    env = ServingEnv(game.observation_space, game.action_space, max_concurrent=places)
    policy = functools.partial(PPOPolicy, settings=PPOSettings(learning_rate=1e-3))
    learning = SyncSamplesSettings(num_sgd_iter=6, minibatch_size=128, standardize_fields=("advantages",))
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(
            CommonPolicyEvaluator(env, policy, num_envs=PLAYERS, rollout_fragment_length=256, seed=0)
        )
        server = stack.enter_context(PolicyServer(evaluator, HttpSettings(port=0), sample=False))
        print("serving at", server.url)
        for seed in range(PLAYERS):
            command = [sys.executable, __file__, "--play", server.url, str(seed), inference]
            player = stack.enter_context(subprocess.Popen(command))
            stack.callback(player.kill)
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator), learning)
        window = MetricsWindow(50)
        for _ in range(iterations):
            optimizer.step()
            window.add(evaluator.get_metrics())
            mean = window.summary()["rollout/ep_rew_mean"]
            print(f"{optimizer.num_steps_sampled:6d} steps learnt from, mean return {mean:6.1f}", flush=True)
        print(f"requests refused: {server.stats()['rejected'] or 'none'}")


if __name__ == "__main__":
    if "--play" in sys.argv:
        with contextlib.suppress(ServingError, KeyboardInterrupt):  # no server for ten seconds
            play(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        serve(1 if "--quick" in sys.argv else 40, "local" if "--local" in sys.argv else "remote")
