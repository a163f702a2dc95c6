"""The pages' files, and the live page in a headless Chromium against a real server."""

import contextlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="not installed: the extra [serve]")

import rlsample.serving
from rlsample.serving.page_files import PAGE_PATHS, page_file
from tests.serving.browser import console_errors, element, needs_chromium, open_browser, shown, state, until
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


def until_still(count, still_s=1.5):
    """Waits for a count that stays for longer than a poll's second, and returns it."""
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
