"""A headless Chromium for tests, and what they ask of a page."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LIMIT_S = 60.0  # a busy machine draws slowly
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--no-proxy-server",
    "--window-size=1000,800",
)


def _why_not():
    missing = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", CHROMEDRIVER)) if path is None]
    with contextlib.suppress(ImportError):
        import selenium  # noqa: F401

        return f"not installed: {', '.join(missing)}" if missing else None
    return "not installed: selenium (pip install 'rlsample[dev]')"


needs_chromium = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


@contextlib.contextmanager
def open_browser(folder: Path):
    """A Chromium with a fresh profile in the folder; it and its driver are gone afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # An own process group: whatever of Chromium outlives a driver that fails can be ended by it.
    service = Service(CHROMEDRIVER, log_output=subprocess.DEVNULL, popen_kw={"start_new_session": True})
    driver = None
    try:
        driver = webdriver.Chrome(options=options, service=service)
        driver.set_script_timeout(LIMIT_S)
        driver.set_page_load_timeout(LIMIT_S)
        yield driver
    finally:
        if driver is not None:
            with contextlib.suppress(Exception):
                driver.quit()
            driver.command_executor.close()
        process = getattr(service, "process", None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT_S)


def until(condition, what, limit_s=LIMIT_S):
    """Polls until the condition holds, and returns what it returned; fails saying what was waited for."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.02)
    return found


def element(driver, selector):
    """The first element of a CSS selector."""
    return driver.find_element("css selector", selector)


def state(driver):
    """What the page says about the server."""
    return element(driver, "#state").text


def shown(driver):
    """Name -> text of every number on the page, read at one moment."""
    return driver.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('[data-stat]')]"
        ".map((item) => [item.dataset.stat, item.textContent]))"
    )


def number(driver, name):
    """A number of the page; -1 where there is none yet."""
    return float(shown(driver)[name].replace(",", "").replace("–", "-1"))


def console_errors(driver):
    """What went wrong in the page since this was last asked: exceptions, refused by the policy, failed loads."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
