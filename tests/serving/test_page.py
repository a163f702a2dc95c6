"""The live page and the demo, in a headless Chromium against a real server."""

import contextlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

pytest.importorskip("uvicorn", reason="not installed: the extra [serve]")

import rlsample.serving
from rlsample.serving.page_files import PAGE_PATHS, page_file
from tests.env.serving.conftest import rows_of
from tests.serving.browser import console_errors, element, needs_chromium, number, open_browser, shown, state, until
from tests.serving.cartpole_server import CartPoleServer

FOLDER = Path(rlsample.serving.__file__).with_name("page")


# ---------------------------------------------------------------------- files, without a browser


def test_every_file_of_the_folder_is_in_the_table_and_the_other_way_round():
    bodies = {page_file(path).body for path in PAGE_PATHS}
    assert len(bodies) == len(PAGE_PATHS)
    assert bodies == {path.read_bytes() for path in FOLDER.iterdir()}


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_files_go_out_with_their_type_and_a_strict_policy(path):
    headers = dict(page_file(path).headers)
    ending = {"/": b"html", "/demo": b"html"}.get(path, path.rpartition(".")[2].encode())
    types = {b"html": b"text/html", b"js": b"text/javascript", b"css": b"text/css", b"svg": b"image/svg+xml"}
    assert headers[b"content-type"].split(b";")[0] == types[ending]
    assert int(headers[b"content-length"]) == len(page_file(path).body)
    assert headers[b"content-security-policy"].startswith(b"default-src 'self';")
    assert b"unsafe" not in headers[b"content-security-policy"]
    assert headers[b"x-content-type-options"] == b"nosniff"


NO_PATHS = """
/demo/ /index.html /static/ /static/../page_files.py /static/%2e%2e/wire.py /static//live.js //etc/passwd
/static/live.js\0 /STATIC/live.js static/live.js /page/live.js /static/live.js?x
"""


@pytest.mark.parametrize("path", ["", *NO_PATHS.split()])
def test_what_is_not_in_the_table_does_not_exist(path):
    assert page_file(path) is None


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_files_need_nothing_from_elsewhere_and_no_inline_code(path):
    """Else the policy would break the page, or the page would tell others that it was looked at."""
    text = page_file(path).body.decode()
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
    linked = re.findall(r"(?:src|href)=\"([^\"]+)\"", text) if text.startswith("<!doctype") else []
    linked += [f"static/{name}" for name in re.findall(r"from \"\./([^\"]+)\"", text)]
    pages = {"demo", "./", "docs", "metrics", "v1/stats"}
    assert {name for name in linked if name not in pages} <= {known[1:] for known in PAGE_PATHS}
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=\"", text)


def test_a_server_with_a_token_answers_the_pages_without_it_and_only_them():
    with CartPoleServer(token="a-secret") as served:
        for path in PAGE_PATHS:
            status, headers, body = get(served, path)
            assert (status, body) == (200, page_file(path).body)
            assert {(name.decode(), value.decode()) for name, value in page_file(path).headers} <= headers
        assert get(served, "/v1/stats")[0] == 401
        for path in ("/static/../page_files.py", "/static/%2e%2e/wire.py", "/static/live.js%00", "/demo/x"):
            assert get(served, path)[0] in (401, 404)
            assert get(served, path, "a-secret")[0] == 404


def get(served, path, token=None):
    """Status, headers and body of a GET whose path goes out as it is written."""
    connection = http.client.HTTPConnection(*served.server.address, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, {(k.lower(), v) for k, v in response.getheaders()}, response.read()


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


# ---------------------------------------------------------------------- live page


def post(url, path, body, token=None, key=None):
    """The answer to a call, or its status where it was refused."""
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as e:
        with e:
            return e.code


def play_episode(url, rewards, token=None):
    """An episode over HTTP with these rewards."""
    episode = post(url, "episodes", {}, token)["episode_id"]
    for reward in rewards[:-1]:
        post(url, f"episodes/{episode}/action", {"obs": [0, 0, 0, 0]}, token)
        post(url, f"episodes/{episode}/returns", {"reward": reward}, token)
    post(url, f"episodes/{episode}/action", {"obs": [0, 0, 0, 0]}, token)
    post(url, f"episodes/{episode}/end", {"obs": [0, 0, 0, 0], "reward": rewards[-1]}, token)


@needs_chromium
def test_live_page_shows_what_stats_say_until_the_server_stops(tmp_path):
    with open_browser(tmp_path) as driver:
        with CartPoleServer() as served:
            driver.get(served.url)
            until(lambda: state(driver).startswith("Live"), "the first answer")
            numbers = shown(driver)
            assert (numbers["episodes"], numbers["return_mean"], numbers["rejected"]) == ("0", "–", "0")
            assert element(driver, "#returns text.empty").text == "no episode has ended yet"

            for rewards in ([1.5, 2.0], [1200.25], [-3.0, 1.0, 0.25]):
                play_episode(served.url, rewards)
            served.policy.set_weights({})
            open_one = post(served.url, "episodes", {})["episode_id"]
            assert post(served.url, f"episodes/{open_one}/action", {"obs": [1, 2]}) == 400
            assert post(served.url, "episodes/none/end", {"obs": [0, 0, 0, 0]}) == 404
            until(lambda: shown(driver)["rejected"] == "2", "the refused calls")
            numbers = shown(driver)
            stats = served.stats()
            assert stats["returns"] == [3.5, 1200.25, -1.75]
            assert {key: numbers[key] for key in ("open_episodes", "episodes", "sampled_steps", "policy_version")} == {
                "open_episodes": "1",
                "episodes": "3",
                "sampled_steps": "6",
                "policy_version": str(stats["policy_version"]),
            }
            assert stats["policy_version"] > 0
            assert numbers["return_mean"] == "401"
            for name in ("p50_ms", "p99_ms"):
                assert abs(float(numbers[name].replace(",", "")) - stats[name]) <= (
                    0.0051 if stats[name] < 99 else 0.51
                )
            assert [item.text for item in driver.find_elements("css selector", "#rejected li")] == [
                f"{code}: {times}" for code, times in stats["rejected"].items()
            ]
            assert len(driver.find_elements("css selector", "#returns circle")) == 3
            assert "3 values, the last is -1.75" in element(driver, "#returns svg").get_attribute("aria-label")
            assert console_errors(driver) == []
            port = served.server.address[1]

        until(lambda: "cannot be reached" in state(driver), "the stop is said")
        assert "Last answer at" in state(driver)
        assert element(driver, "#numbers").get_attribute("class") == "old"
        assert shown(driver)["episodes"] == "3"  # still there, greyed
        with CartPoleServer(port=port):
            until(lambda: state(driver).startswith("Live"), "it is there again")
            assert element(driver, "#numbers").get_attribute("class") == ""
            assert shown(driver)["episodes"] == "0"


def until_still(count, still_s=2.5):
    """Waits for a count that stays for longer than two polls, and returns it."""
    seen, since = count(), time.monotonic()
    deadline = since + 30
    while time.monotonic() - since < still_s:
        assert time.monotonic() < deadline, f"{count} goes on rising"
        time.sleep(0.05)
        if (now := count()) != seen:
            seen, since = now, time.monotonic()
    return seen


HIDE = """
Object.defineProperty(document, "visibilityState", { configurable: true, get: () => arguments[0] });
document.dispatchEvent(new Event("visibilitychange"));
"""


@needs_chromium
def test_token_is_asked_for_kept_in_the_tab_only_and_a_hidden_tab_asks_nothing(tmp_path):
    with CartPoleServer(token="a-secret") as served, open_browser(tmp_path) as driver:
        requests = lambda: served.server.metrics.requests  # noqa: E731
        driver.get(served.url)
        until(lambda: "wants a token" in state(driver), "the need of a token is said")
        field = element(driver, "#token")
        assert field.is_displayed()
        field.send_keys("wrong\n")
        until(lambda: "does not take this token" in state(driver), "the wrong token is said")
        refused = lambda: served.stats()["rejected"]["unauthorized"]  # noqa: E731
        assert until_still(refused) == 2  # without a right token it does not go on asking
        field.send_keys("a-secret\n")
        until(lambda: state(driver).startswith("Live"), "the right token")
        assert not field.is_displayed()
        kept = "return [Object.values(sessionStorage), Object.values(localStorage), document.cookie, location.href]"
        assert driver.execute_script(kept) == [["a-secret"], [], "", f"{served.url}/"]

        driver.execute_script(HIDE, "hidden")
        asked = until_still(requests)
        driver.execute_script(HIDE, "visible")
        until(lambda: requests() > asked, "asks again when looked at")

        driver.get(f"{served.url}/demo")  # same tab, same token
        element(driver, "#start").click()
        until(lambda: served.stats()["actions"] > 0, "the demo plays with it")
        element(driver, "#stop").click()
        until(lambda: state(driver).startswith("Stopped"), "stopped")
        element(driver, "#forget-token").click()
        assert driver.execute_script(kept)[0] == []
        element(driver, "#start").click()
        until(lambda: element(driver, "#token").is_displayed(), "asks for the token")


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
