"""CartPole in the browser, against a real server: Gymnasium's physics, rows and ends, trouble and leaving."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

pytest.importorskip("uvicorn", reason="not installed: the extra [serve]")

from tests.env.serving.conftest import rows_of
from tests.serving.browser import console_errors, element, needs_chromium, number, open_browser, state, until
from tests.serving.cartpole_server import CartPoleServer

# ---------------------------------------------------------------------- physics

PLAY = """
const [cases, done] = arguments;
import("./static/cartpole.js").then(({ CartPole }) => done(cases.map(({ start, steps }) => {
  const pole = new CartPole();
  pole.state = start;
  return steps.map(({ action, before }) => {
    if (before) pole.state = before;
    const { reward, terminated, truncated } = pole.step(action);
    return { state: pole.state, obs: pole.observation(), reward, terminated, truncated };
  });
}))).catch((error) => done(String(error)));
"""
SUMS = """
const done = arguments[0];
import("./static/chart.js").then(({ runningMean, grouped, niceCeiling }) => done([
  runningMean([1, 2, 6, 4], 2), grouped([1, 3, 5, 7, 10], 2), grouped([5], 9), [3, 0.11, 500, 501, 0].map(niceCeiling),
])).catch((error) => done(String(error)));
"""
MISUSE = """
const done = arguments[0];
import("./static/cartpole.js").then(({ CartPole }) => {
  const said = (call) => { try { call(); return "nothing"; } catch (error) { return error.message; } };
  const pole = new CartPole(() => 0.75);
  const start = pole.state;
  const wrong = [2, true, "1", undefined].map((action) => said(() => pole.step(action)));
  const untouched = pole.state === start && pole.steps === 0;
  pole.state = [2.5, 0, 0, 0];
  pole.step(1);
  done({ start, wrong, untouched, afterEnd: said(() => pole.step(1)) });
}).catch((error) => done(String(error)));
"""


def gymnasium_episode(seed, skilled, start=None, last_before=None):
    """The states of an episode and what came of each action; ``last_before`` replaces the state before step 500."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    if start is not None:
        env.unwrapped.state = np.array(start)
    rng = np.random.default_rng(seed)
    first, steps, ended = env.unwrapped.state.tolist(), [], False
    while not ended:
        if len(steps) == 499 and last_before is not None:
            env.unwrapped.state = np.array(last_before)
        before = env.unwrapped.state
        action = int(before @ [0.03, 0.1, 1.0, 0.3] > 0) if skilled else int(rng.integers(2))
        obs, reward, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
        steps.append(
            {"action": action, "before": before.tolist(), "state": env.unwrapped.state.tolist(), "obs": obs.tolist()}
            | {"reward": reward, "terminated": terminated, "truncated": truncated}
        )
    env.close()
    return first, steps


EPISODES = {
    "balanced to the limit": (gymnasium_episode(0, True), 500, (False, True)),
    "the pole falls": (gymnasium_episode(2, False), None, (True, False)),
    "off the track to the right": (gymnasium_episode(4, True, [2.3, 1.5, 0.0, 0.0]), None, (True, False)),
    "off the track to the left": (gymnasium_episode(4, True, [-2.3, -1.5, 0.0, 0.0]), None, (True, False)),
    "falls in the very last step": (gymnasium_episode(1, True, None, [0, 0, 0.2, 1.0]), 500, (True, True)),
}


@needs_chromium
def test_physics_are_gymnasiums_step_for_step_and_sums_are_right(tmp_path):
    """From the same state each step gives the same state to 1e-9, the same float32 observation and the same flags; so
    does a whole episode of 500 steps from its first state alone (to 1e-6: an upright pole magnifies each error)."""
    with CartPoleServer() as served, open_browser(tmp_path) as driver:
        driver.get(f"{served.url}/demo")
        for name, ((start, steps), length, flags) in EPISODES.items():
            assert length in (None, len(steps)), name
            assert (steps[-1]["terminated"], steps[-1]["truncated"]) == flags, name
            asked = [{key: step[key] for key in ("action", "before")} for step in steps]
            alone = [{"action": step["action"]} for step in steps]
            cases = [{"start": start, "steps": asked}]
            if name != "falls in the very last step":
                cases.append({"start": start, "steps": alone})
            found = driver.execute_async_script(PLAY, cases)
            assert isinstance(found, list), found
            for played, tolerance in zip(found, (1e-9, 1e-6), strict=False):
                assert len(played) == len(steps)
                for ours, theirs in zip(played, steps, strict=True):
                    np.testing.assert_allclose(ours["state"], theirs["state"], rtol=0, atol=tolerance, err_msg=name)
                    for key in ("reward", "terminated", "truncated"):
                        assert ours[key] == theirs[key], (name, key)
            for ours, theirs in zip(found[0], steps, strict=True):
                np.testing.assert_allclose(ours["obs"], theirs["obs"], rtol=0, atol=1e-9, err_msg=name)
                assert ours["obs"] == np.float32(ours["obs"]).astype(float).tolist()

        misuse = driver.execute_async_script(MISUSE)
        np.testing.assert_allclose(misuse["start"], [0.025] * 4, atol=1e-15)
        assert [words[:20] for words in misuse["wrong"]] == ["an action is 0 or 1,"] * 4
        assert misuse["untouched"]
        assert misuse["afterEnd"] == "the episode has ended: call reset()"

        means, five, one, ceilings = driver.execute_async_script(SUMS)
        assert means == [1, 1.5, 4, 5]
        assert five == [{"at": 1, "value": 3}, {"at": 3.5, "value": 8.5}]
        assert one == [{"at": 0, "value": 5}]
        assert ceilings == [5, 0.2, 500, 1000, 0]
        assert console_errors(driver) == []


# ---------------------------------------------------------------------- demo


def start_demo(driver, url, carts, speed):
    """Opens the demo and presses Start."""
    driver.get(f"{url}/demo")
    element(driver, f'#carts option[value="{carts}"]').click()
    element(driver, f'input[value="{speed}"]').click()
    element(driver, "#start").click()


PICTURES = "return [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"


def check_episode(rows):
    """One served episode's rows are CartPole's: consecutive, each worth 1, each step the physics' own."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    for t, (obs, next_obs, action, reward, _, _, row_t) in enumerate(rows):
        assert (reward, row_t) == (1.0, t)
        assert t == 0 or obs == rows[t - 1][1]
        env.state = np.array(obs, np.float64)
        env.steps_beyond_terminated = None
        after, _, terminated, _, _ = env.step(action)
        np.testing.assert_allclose(next_obs, after, rtol=1e-5, atol=1e-5)
        assert rows[t][4] == terminated
    assert np.abs(rows[0][0]).max() <= 0.05


@needs_chromium
def test_demo_plays_episodes_and_every_step_is_a_row_with_its_reward_and_end(tmp_path):
    with CartPoleServer() as served, open_browser(tmp_path) as driver:
        start_demo(driver, served.url, 4, "real")
        until(lambda: number(driver, "steps") > 0, "a step")
        first = driver.execute_script(PICTURES)
        until(lambda: number(driver, "episodes") >= 6, "episodes that fall")
        later = driver.execute_script(PICTURES)
        assert len(first) == len(later) == 4
        assert not set(first) & set(later)  # every cart is drawn where it stands
        served.policy.skilled = True
        element(driver, 'input[value="fast"]').click()
        until(lambda: 500.0 in served.stats()["returns"], "an episode of 500 steps")
        element(driver, "#stop").click()
        until(lambda: state(driver).startswith("Stopped"), "stopped")
        assert element(driver, "#start").is_enabled()
        steps, episodes = number(driver, "steps"), number(driver, "episodes")
        stats = served.stats()
        assert (stats["open_episodes"], stats["rejected"]) == (0, {})
        assert len(driver.find_elements("css selector", "#returns circle")) == episodes
        assert console_errors(driver) == []

        played = rows_of(served.rows())
        assert sum(len(rows) for rows in played.values()) == steps
        cut_off = 0
        for rows in played.values():
            check_episode(rows)
            terminated, truncated = rows[-1][4:6]
            assert not any(flag for row in rows[:-1] for flag in row[4:6])
            assert terminated != truncated
            assert truncated or len(rows) < 500
            cut_off += truncated and len(rows) < 500
        assert cut_off <= 4  # what was open at Stop
        assert len(played) - cut_off == episodes
        returns = sorted(float(len(rows)) for rows in played.values())
        assert returns == sorted(stats["returns"])
        assert returns[-1] == 500.0


STAND_STILL = """
const real = window.fetch;
window.fetch = (path, options) => {
  if (path !== "v1/actions") return real(path, options);
  window.standsStill = true;
  return new Promise(() => {});
};
"""


@needs_chromium
def test_demo_ends_its_episodes_when_the_page_goes_away(tmp_path):
    with CartPoleServer() as served, open_browser(tmp_path) as driver:
        served.policy.skilled = True
        start_demo(driver, served.url, 4, "real")
        until(lambda: number(driver, "steps") >= 20 and served.stats()["open_episodes"] == 4, "some steps of all")
        driver.execute_script(STAND_STILL)  # or the action under way would have to be waited for
        until(lambda: driver.execute_script("return window.standsStill"), "no action is under way")
        steps = served.stats()["sampled_steps"]
        until(lambda: number(driver, "steps") == steps, "the page shows all steps")
        assert console_errors(driver) == []
        driver.get("about:blank")
        until(lambda: served.stats()["open_episodes"] == 0, "the episodes are ended")
        assert served.stats()["rejected"] == {}
        played = rows_of(served.rows())
        assert sum(len(rows) for rows in played.values()) == steps
        assert len(played) == 4
        for rows in played.values():
            check_episode(rows)
            assert rows[-1][4:6] == (False, True)  # cut off at its true last observation


@needs_chromium
def test_demo_goes_on_where_the_server_is_full_restarts_or_plays_something_else(tmp_path):
    with open_browser(tmp_path) as driver:
        with CartPoleServer(max_concurrent=2) as served:
            start_demo(driver, served.url, 4, "real")
            until(lambda: "asks to wait (503 busy)" in state(driver), "there is no place for all")
            before = number(driver, "steps")
            until(lambda: number(driver, "steps") > before + 10, "the two that have one play on")
            assert served.stats()["open_episodes"] <= 2
            port = served.server.address[1]
        until(lambda: "cannot be reached" in state(driver), "the stop is said")
        with CartPoleServer(port=port) as served:
            until(lambda: served.stats()["episodes"] >= 4, "new episodes on the new server")
            until(lambda: state(driver) == "Playing.", "all is well again")
            element(driver, "#stop").click()
            until(lambda: state(driver).startswith("Stopped"), "stopped")
            assert served.stats()["open_episodes"] == 0
            for rows in rows_of(served.rows()).values():
                check_episode(rows)
        with CartPoleServer(port=port, spaces=(Box(-1, 1, (3,)), Discrete(2))) as served:
            element(driver, "#start").click()
            until(lambda: "something else than CartPole" in state(driver), "another env is said")
            assert element(driver, "#advice").is_displayed()
            assert served.stats()["open_episodes"] == 0
