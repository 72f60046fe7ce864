"""The live view in a real browser: colours, slow steps, and progress of a demonstration."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.browsing import hold_after, page_of
from tests.support.engine_child import pid_of, started
from tests.support.serving import Served, serve, wait_until
from tools.fixtures.fake_engine import fake_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

COLOURS = """async () => {
    const { colour, styled } = await import("/page/js/live/colours.js");
    return [Array.from({ length: 8 }, (_, key) => colour(key)), styled("--panel")];
}"""
SLOW_STEPS = """async () => {
    const { tape } = await import("/page/js/main.js");
    const row = (step) => ({ step, steps: 1, seconds: 8, idle: 0, segments: [[1, 64, 0, 1]] });
    tape.add(Array.from({ length: 9 }, (_, step) => row(step)));
    const height = tape.view.canvas.clientHeight;
    return [[...tape.seen(height)].length, tape.scale(height), tape.scale(1e9)];
}"""


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_eight_requests_have_eight_colours(browser: Browser, served: Served) -> None:
    with page_of(browser, served, color_scheme="light") as page:
        found = [page.evaluate(COLOURS)]
        page.emulate_media(color_scheme="dark")
        found.append(page.evaluate(COLOURS))
    grounds = {ground for _, ground in found}
    assert len(grounds) == 2
    for colours, ground in found:
        assert len(set(colours)) == 8
        for colour in colours:
            light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, ground)


def test_slow_steps_leave_room_for_others(browser: Browser, served: Served) -> None:
    with page_of(browser, served) as page:
        assert page.evaluate(SLOW_STEPS)[0] >= 4
        num_seen, scale, most = page.evaluate(SLOW_STEPS)
        assert num_seen <= 5 and 0 < scale < most == 60


def test_a_demonstration_shows_how_far_it_is(browser: Browser) -> None:
    config = fake_config(num_blocks=64, block_size=4, max_model_len=128)
    with serve(config=config, step_time=0.01) as served, page_of(browser, served) as page:
        going_on = hold_after(served, 20)  # during the demonstration
        page.click("#demo-fill")
        page.wait_for_function("() => document.querySelector('#demo-bar').value > 20")
        wait_until(lambda: served.runner.num_steps > 20, "the engine to stop")
        bar, said = page.locator("#demo-bar"), page.locator("#demo-counts")
        most = int(bar.get_attribute("max") or 0)
        assert 0 < bar.evaluate("bar => bar.position") < 1
        page.wait_for_timeout(300)
        assert said.inner_text().endswith("preemptions") and f" of {most} tokens" in said.inner_text().replace(
            ",", "", 1
        )
        served.runner.step_time = 0.0
        going_on.set()
        page.wait_for_selector("#demo-progress", state="hidden")
        assert "every request got its whole answer" in page.locator("#demo-status").inner_text()


@pytest.mark.full
def test_a_restart_of_the_engine_is_shown(browser: Browser) -> None:
    with serve(engine=started("fake", max_restarts=10)) as served, page_of(browser, served) as page:
        page.wait_for_selector("#connection[data-state=live]")
        os.kill(pid_of(served.engine), signal.SIGKILL)
        page.wait_for_selector("#connection:text-is('restarting')[data-state=paused]")
        page.wait_for_selector("#connection:text-is('live')[data-state=live]")
