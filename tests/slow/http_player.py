"""A client process: plays CartPole with the policy behind a server until it is killed.

    python -m tests.slow.http_player URL FOLDER SEED

Writes each observation, 16 bytes, into FOLDER/asked-SEED before it asks for its action, and a line for each whole
episode into FOLDER/returns, which all players share. What is written survives kill -9.
"""

import sys
from pathlib import Path

import gymnasium

from rlsample.errors import EpisodeLostError
from rlsample.serving import ClientSettings, PolicyClient


def main(url, folder, seed):
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=seed)
    with (
        PolicyClient(url, settings=ClientSettings(timeout_s=600.0)) as client,
        open(folder / f"asked-{seed}", "ab", buffering=0) as asked,
        open(folder / "returns", "ab", buffering=0) as returns,
    ):
        while True:
            client.start_episode()
            total, terminated, truncated = 0.0, False, False
            try:
                while not (terminated or truncated):
                    asked.write(obs.tobytes())
                    obs, reward, terminated, truncated, _ = env.step(client.get_action(obs))
                    client.log_returns(reward)
                    total += reward
                client.end_episode(obs, truncated=truncated and not terminated)
                returns.write(b"%d\n" % total)
            except EpisodeLostError:  # the server was killed: its next run does not know the episode
                pass
            obs, _ = env.reset()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
