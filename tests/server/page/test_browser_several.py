"""The page of a server with several models: one is picked to talk to and to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browsing import browser_or_skip, page_of, say, wait_for_answer
from tests.support.serving import serve, wait_until
from tests.support.several import FakeModel, serve_models

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browser_or_skip()


def test_a_model_is_picked(browser: Browser) -> None:
    models = {name: FakeModel(salt) for salt, name in enumerate("ab")}
    with serve_models({name: one.source for name, one in models.items()}, 100) as served:
        served_: Any = served
        with page_of(browser, served_, live=False) as page:
            page.wait_for_selector("#connection[data-state=paused]")
            assert page.inner_text("#connection") == "not loaded"
            assert page.locator("#model-pick option").all_inner_texts() == ["a (unloaded)", "b (unloaded)"]
            page.click("#settings-open")
            page.get_by_label("Tokens at most").fill("4")
            page.select_option("#model-pick", "b")
            say(page, "hello")
            wait_for_answer(page)
            assert served.states() == {"a": "unloaded", "b": "loaded"}
            page.wait_for_selector("#connection[data-state=live]")
            page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('b ·')")
            page.wait_for_function("() => document.querySelector('#models-text').textContent.startsWith('1 of 2')")
            # Another takes its place, and is looked at.
            page.select_option("#model-pick", "a")
            say(page, "hello again")
            wait_for_answer(page, 2)
            wait_until(lambda: served.states() == {"a": "loaded", "b": "unloaded"}, "a")
            page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('a ·')")


def test_one_model_is_not_picked(browser: Browser) -> None:
    with serve() as served, page_of(browser, served) as page:
        assert page.is_hidden("#models")
