"""A visitor's browser teaches the policy CartPole: `rlsample serve --train` and the demo page, nothing else.

`pytest -m slow -rP tests/slow/test_demo_learning.py` prints how long it took.
"""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.serving.browser import console_errors, element, needs_chromium, number, open_browser, shown, state, until

pytestmark = pytest.mark.slow

GOAL = 475.0  # mean of 20 episodes in a row
LIMIT_S = 1200.0


@needs_chromium
def test_the_demo_teaches_the_policy_behind_the_server(tmp_path):
    command = [sys.executable, "-m", "rlsample.cli", "serve", "--algo", "ppo", "--env-spaces", "CartPole-v1", "--train"]
    command += ["--port", "0", "--seed", "0", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serving:
        try:
            url = next(found[0] for line in serving.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
            with open_browser(tmp_path) as driver:
                seconds = learn(driver, url)
                numbers, stats = shown(driver), stats_of(url)
                assert console_errors(driver) == []
        finally:
            serving.send_signal(signal.SIGINT)
            status = serving.wait(60)
    print(
        f"mean of 20 episodes {numbers['mean']} after {seconds:.0f} s, {numbers['steps']} steps and "
        f"{numbers['episodes']} episodes; p50 {stats['p50_ms']:.1f} ms, p99 {stats['p99_ms']:.1f} ms"
    )
    assert status == 130
    assert stats["rejected"] == {}
    assert stats["open_episodes"] == 0
    steps = int(numbers["steps"].replace(",", ""))
    assert steps - 5_000 < stats["sampled_steps"] <= steps  # what is not sampled yet waits for its batch to be full
    assert stats["trained_steps"] >= stats["sampled_steps"] - 5_000  # a step counts each time it is used
    assert (tmp_path / "run" / "checkpoints").is_dir()


def learn(driver, url):
    """Plays until the goal is reached, then presses Stop; returns the seconds it took."""
    driver.get(f"{url}/demo")
    element(driver, 'input[value="fast"]').click()
    element(driver, "#start").click()
    started = time.monotonic()
    until(lambda: number(driver, "mean") >= GOAL, "the returns of the goal", LIMIT_S)
    seconds = time.monotonic() - started
    element(driver, "#stop").click()
    until(lambda: state(driver).startswith("Stopped"), "stopped")
    return seconds


def stats_of(url):
    """What /v1/stats answers."""
    with urllib.request.urlopen(f"{url}/v1/stats", timeout=30) as response:
        return json.load(response)
