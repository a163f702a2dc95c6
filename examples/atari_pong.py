"""Sixteen games of Pong on C++ threads, in two groups: one steps while the other is acted on.

python examples/atari_pong.py            15,000 steps of a policy that follows the ball
python examples/atari_pong.py --quick    a few hundred steps
"""

import sys
import time

import numpy as np

from rlsample.env import make_atari

QUICK = "--quick" in sys.argv
UP, DOWN, STAY = 2, 3, 0


def heights(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the ball and of the right paddle, float[K], in frames uint8[K, 84, 84]."""
    bright = frames[:, 14:76] > 100  # between the walls
    rows = np.arange(62)
    parts = (bright[:, :, 12:72].any(2), 31), (bright[:, :, 74], 64)  # and where they are if not seen
    return tuple(np.where(s.any(1), (s * rows).sum(1) / np.maximum(1, s.sum(1)), unseen) for s, unseen in parts)


def follow_the_ball(obs: np.ndarray) -> np.ndarray:
    """Actions int64[K] for observations uint8[K, 4, 84, 84]: the paddle goes where the ball will be in two steps."""
    (ball, paddle), (ball_was, paddle_was) = heights(obs[:, -1]), heights(obs[:, -2])
    ball = ball + np.where(np.abs(ball - ball_was) < 8, 2 * (ball - ball_was), 0)
    paddle = paddle + 0.7 * (paddle - paddle_was)
    return np.where(ball < paddle - 3, UP, np.where(ball > paddle + 3, DOWN, STAY))


def main() -> None:
    num_steps = 300 if QUICK else 15_000
    with make_atari("Pong-v5", num_envs=2 if QUICK else 16, groups=2, seed=0) as env:
        print(f"{env.num_envs} games of {env.game}, actions {', '.join(env.action_meanings)}")
        batch, steps, won, lost = env.poll(), 0, 0, 0
        started = time.perf_counter()
        while steps < num_steps:
            ids, obs = batch.env_ids, batch.obs
            over = batch.terminated | batch.truncated
            if over.any():
                for info in batch.infos.values():
                    print(f"  a game of {info['game_length']} steps: {info['game_return']:+.0f}")
                obs[over] = env.try_reset(ids[over]).obs
            env.send_actions(ids, follow_the_ball(obs))
            batch = env.poll()  # the other half, which stepped meanwhile
            steps += len(batch.env_ids)
            won += int((batch.rewards > 0).sum())
            lost += int((batch.rewards < 0).sum())
        took = time.perf_counter() - started
    print(f"{steps / took:,.0f} steps/s ({4 * steps / took:,.0f} frames/s), points won {won}, lost {lost}")


if __name__ == "__main__":
    main()
