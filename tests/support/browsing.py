"""Opens the page in a browser and fails on any error that happens there."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.pool_picture import PoolPicture
from tests.support.serving import DEADLINE, Served
from tools.fixtures.browser import VARIABLE, find_chromium, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 780}
# Milliseconds. Generous, because speed is not under test.
PATIENCE = 30_000


def browser_or_skip() -> Iterator[Browser]:
    """Yield a browser, for a fixture of a module. Skips the test if playwright or Chromium is not installed.

    Playwright's event loop runs until the browser is closed, so tests of the module cannot run another event loop.
    """
    pytest.importorskip("playwright", reason="playwright is not installed: pip install -e '.[dev]'")
    executable = find_chromium()
    if executable is None:
        pytest.skip(f"there is no Chromium here: apt-get install chromium, or name one in {VARIABLE}")
    with open_browser(executable) as browser:
        yield browser


@contextmanager
def page_of(browser: Browser, served: Served, *, live: bool = True, **options: Any) -> Iterator[Page]:
    """Open the page in its own browser context.

    Fails if the page has an error or loads anything from another origin.
    """
    context = browser.new_context(**{"viewport": DESK, **options})
    context.set_default_timeout(PATIENCE)
    problems: list[str] = []

    def check(url: str) -> None:
        if not url.startswith((served.url, "data:", "blob:")):
            problems.append(f"loads {url}")

    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if is_problem(message) else None)
    page.on("request", lambda request: check(request.url))
    try:
        page.goto(served.url)
        if live:
            page.wait_for_selector("#connection[data-state=live]")
            page.wait_for_function("() => document.querySelector('#blocks-text').textContent !== ''")
        yield page
    finally:
        context.close()
    assert not problems, problems


def is_problem(message: Any) -> bool:
    # The browser itself logs a line for each error response.
    return message.type in ("error", "warning") and "Failed to load resource" not in message.text


def hold_after(served: Served, num_steps: int) -> threading.Event:
    """Stop the engine after this number of steps, until the returned event is set.

    Otherwise, a slow browser would show nothing before the requests end.
    """
    going_on = threading.Event()

    def hold(tokens: list[int]) -> None:
        if served.runner.num_steps > num_steps:
            assert going_on.wait(DEADLINE), "the browser does not show the step"

    served.runner.error_for = hold
    return going_on


def say(page: Page, text: str) -> None:
    """Send a message in the chat."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_answer(page: Page, number: int = 1) -> None:
    """Wait until answer ``number``, counted from 1, is complete."""
    page.wait_for_function(
        "n => document.querySelectorAll('.message.assistant').length >= n && !document.querySelector('#send').hidden",
        arg=number,
    )


def ask(page: Page, text: str, number: int = 1) -> None:
    """Send a message in the chat and wait until answer ``number`` is complete."""
    say(page, text)
    wait_for_answer(page, number)


def texts(page: Page, selector: str) -> list[str]:
    return [re.sub(r"\s+", " ", text).strip() for text in page.locator(selector).all_inner_texts()]


def picture_of(page: Page) -> PoolPicture:
    """Return the block pool as the live view shows it."""
    found = page.evaluate(
        """async () => {
            const { pool } = await import("/page/js/main.js");
            const cached = [...pool.cached.keys()].filter((block) => pool.cached[block]);
            return { tables: [...pool.tables], cached, used: pool.numUsed, alsoCached: pool.numCached };
        }"""
    )
    picture = PoolPicture(dict(found["tables"]), set(found["cached"]), is_whole=True)
    used = {block for table in picture.tables.values() for block in table}
    assert (found["used"], found["alsoCached"]) == (len(used), len(picture.cached - used))
    return picture
