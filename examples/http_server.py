"""A policy behind a port, and a client that plays: the policy learns CartPole from what comes over HTTP alone.

    python examples/http_server.py [--quick]

Server and client are one process here, so that it is one file. Elsewhere the client is any program that speaks HTTP:
each call below is one POST with a JSON body (docs/serving.md).
"""

import http.client
import json
import sys
import threading

import gymnasium

from rlsample import CommonPolicyEvaluator, PPOPolicy
from rlsample.env import ServingEnv
from rlsample.evaluation import EvaluatorSet, MetricsWindow
from rlsample.optimizers import SyncSamplesOptimizer, SyncSamplesSettings
from rlsample.serving import HttpSettings, PolicyServer


def play(address):
    """Episode after episode, until the server says that it is closed."""
    connection = http.client.HTTPConnection(*address)

    def call(path, **body):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        values = json.load(answer)
        if answer.status >= 400:
            raise ConnectionError(values["error"]["message"])
        return values

    env = gymnasium.make("CartPole-v1")
    try:
        while True:
            episode = "/v1/episodes/" + call("/v1/episodes")["episode_id"]
            obs, _ = env.reset()
            reward = terminated = truncated = 0
            while not (terminated or truncated):
                action = call(f"{episode}/action", obs=obs.tolist(), reward=reward)["action"]
                obs, reward, terminated, truncated, _ = env.step(action)
            call(f"{episode}/end", obs=obs.tolist(), reward=reward, truncated=bool(truncated and not terminated))
    except (ConnectionError, http.client.HTTPException) as e:
        print(f"a client was told: {e}")
    finally:
        connection.close()
        env.close()


def main(iterations):
    cartpole = gymnasium.make("CartPole-v1")
    served = ServingEnv(cartpole.observation_space, cartpole.action_space)
    learning = SyncSamplesSettings(num_sgd_iter=6, minibatch_size=128, standardize_fields=("advantages",))
    with CommonPolicyEvaluator(served, PPOPolicy, num_envs=2, rollout_fragment_length=256, seed=0) as evaluator:
        optimizer = SyncSamplesOptimizer(EvaluatorSet(evaluator), learning)
        window = MetricsWindow(50)
        with PolicyServer(evaluator, HttpSettings(port=0), sample=False) as server:
            print(f"serving on {server.url}, which has a live view too")
            clients = [threading.Thread(target=play, args=(server.address,)) for _ in range(2)]
            for client in clients:
                client.start()
            for iteration in range(iterations):
                optimizer.step()
                window.add(evaluator.get_metrics())
                if iteration % 5 == 4 or iteration == iterations - 1:
                    mean = window.summary()["rollout/ep_rew_mean"]
                    print(f"{optimizer.num_steps_sampled:6d} steps learnt from, mean return {mean:6.1f}")
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(1 if "--quick" in sys.argv else 20)
