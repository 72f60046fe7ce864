"""The live view in a real browser: colours, slow steps, demonstrations, and the model that is picked of several."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import adapters
from tests.support.browsing import ask, hold_after, page_of, say, wait_for_answer
from tests.support.engine_child import pid_of, started
from tests.support.serving import DEADLINE, Served, serve, wait_until
from tests.support.several_models import FakeModel, serve_fakes, serve_models
from tests.support.tiny_engine import tiny_reference
from tools.fixtures.fake_engine import fake_config, in_thread

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Route

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
    assert len({ground for _, ground in found}) == 2
    for colours, ground in found:
        assert len(set(colours)) == 8
        for colour in colours:
            light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, ground)


def test_the_tape_shrinks_slow_steps_to_show_several_steps(browser: Browser, served: Served) -> None:
    with page_of(browser, served) as page:
        assert page.evaluate(SLOW_STEPS)[0] >= 4
        num_seen, scale, most = page.evaluate(SLOW_STEPS)
        assert num_seen <= 5 and 0 < scale < most == 60


def test_a_demonstration_shows_progress(browser: Browser) -> None:
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


# Amount of engine data in the live view.
SHOWN = """async () => {
    const { history, pool, tape } = await import("/page/js/main.js");
    const points = history.charts.reduce((sum, chart) => sum + chart.points.length, 0);
    return { blocks: pool.numBlocks, used: pool.numUsed, rows: tape.rows.length, points };
}"""


def test_a_model_is_picked(browser: Browser) -> None:
    with serve_fakes("ab", 100) as fakes, page_of(browser, fakes.served, live=False) as page:
        page.wait_for_selector("#connection[data-state=paused]")
        assert page.inner_text("#connection") == "not loaded"
        assert page.locator("#model-pick option").all_inner_texts() == ["a (unloaded)", "b (unloaded)"]
        page.click("#settings-open")
        page.get_by_label("Tokens at most").fill("4")
        page.select_option("#model-pick", "b")
        ask(page, "hello")
        assert fakes.served.states() == {"a": "unloaded", "b": "loaded"}
        page.wait_for_selector("#connection[data-state=live]")
        page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('b ·')")
        page.wait_for_function("() => document.querySelector('#models-text').textContent.startsWith('1 of 2')")
        # Pick another model, which replaces the first in memory and in the live view.
        page.select_option("#model-pick", "a")
        ask(page, "hello again", 2)
        wait_until(lambda: fakes.served.states() == {"a": "loaded", "b": "unloaded"}, "a")
        page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('a ·')")


def test_the_live_view_shows_no_data_of_an_unloaded_model(browser: Browser) -> None:
    """Data of another model, or of the same model before it was unloaded, is not shown either."""
    with serve_fakes("ab") as fakes:
        served: Any = fakes.served

        def check_nothing_is_shown(page: Page, name: str) -> None:
            page.wait_for_function("name => document.querySelector('#model').textContent === name", arg=name)
            page.wait_for_function("() => document.querySelector('#connection').textContent === 'not loaded'")
            assert page.title() == f"{name} · metal-engine"
            assert page.inner_text("#blocks-text") == "" and page.is_hidden("#memory")
            assert page.inner_text("#blocks-now").startswith("Point at a block")
            assert page.evaluate(SHOWN) == {"blocks": 0, "used": 0, "rows": 0, "points": 0}
            assert all(page.locator(f"#demo-{demo}").is_disabled() for demo in ("eight", "long", "fill"))

        def check_is_shown(page: Page, name: str) -> None:
            page.wait_for_function(
                "name => document.querySelector('#model').textContent.startsWith(name)", arg=f"{name} ·"
            )
            page.wait_for_function("() => document.querySelector('#blocks-text').textContent !== ''")
            page.wait_for_selector("#demo-eight:enabled")
            assert page.is_visible("#memory") and page.evaluate(SHOWN)["blocks"]

        assert served.post("/v1/completions", {"model": "a", "prompt": "x", "max_tokens": 2}).status_code == 200
        with page_of(browser, served, live=False) as page:
            check_is_shown(page, "a")
            page.focus("#blocks")
            page.keyboard.press("ArrowRight")
            page.select_option("#model-pick", "b")
            check_nothing_is_shown(page, "b")
            page.select_option("#model-pick", "a")
            check_is_shown(page, "a")
            entry = served.registry.find("a")
            assert entry is not None
            asyncio.run_coroutine_threadsafe(served.registry.unload(entry), served.loop).result(DEADLINE)
            check_nothing_is_shown(page, "a")


def test_the_page_adapts_to_a_restart_from_one_to_several_models(browser: Browser) -> None:
    """The page polls by itself, without any user action."""
    urls: list[str] = []

    def go_there(route: Route) -> None:
        route.continue_(url=route.request.url.replace(urls[0], urls[-1]))

    with ExitStack() as first:
        served = first.enter_context(serve())
        urls.append(served.url)
        with page_of(browser, served) as page:
            assert page.is_hidden("#models")
            served.is_left_idle = False  # the page watches it
            first.close()
            with serve_fakes("ab") as several:
                urls.append(several.served.url)
                page.route("**/v1/models", go_there)
                page.route("**/watch*", go_there)
                page.wait_for_function("() => document.querySelector('#model-pick').value === 'a'")
                assert page.locator("#model-pick option").all_inner_texts() == ["a (unloaded)", "b (unloaded)"]
                page.wait_for_function("() => document.querySelector('#connection').textContent === 'not loaded'")


@pytest.mark.full
def test_a_server_that_has_started_anew_with_other_models(browser: Browser) -> None:
    """The page picks one of the new models and uses it for chat. A single model is shown without a choice."""
    card = {"object": "model", "created": 1, "owned_by": "x", "max_model_len": None, "memory_bytes": 0}
    cards: list[dict[str, Any]] = []

    def have(*names: str) -> None:
        cards[:] = [{**card, "id": name, "loaded": False, "state": "unloaded"} for name in names]

    have("one", "two")
    with serve() as served, page_of(browser, served, live=False) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
        page.reload()
        page.wait_for_function("() => document.querySelector('#model-pick').value === 'one'")
        have("three", "four")
        page.wait_for_function("() => document.querySelector('#model-pick').value === 'three'")
        with page.expect_request(lambda request: request.method == "POST") as asked:
            say(page, "hello")
        assert json.loads(asked.value.post_data or "")["model"] == "three"
        cards[:] = [{**card, "id": served.client().models.list().data[0].id}]
        page.wait_for_selector("#connection[data-state=live]")
        assert page.is_hidden("#models")


def test_a_response_shows_model_loading_and_then_the_request_colour(browser: Browser) -> None:
    """The page finds the request in the engine, because the stream has its id from the start."""
    model = FakeModel(1, step_time=0.03)
    model.gate.clear()
    with serve_models({"a": model.source}, 100) as served, page_of(browser, served, live=False) as page:
        page.wait_for_selector("#connection[data-state=paused]")
        say(page, "hello")
        page.wait_for_function("() => document.querySelector('.waiting')?.textContent === 'loading the model'")
        model.gate.set()
        page.wait_for_function("() => document.querySelector('.message.assistant .dot').style.background !== ''")
        page.click("#stop")
        wait_for_answer(page)
        assert not page.locator(".waiting").is_visible()
        model.runners[0].step_time = 0.0


def test_an_adapter_is_picked(browser: Browser, tmp_path: Path) -> None:
    """The chat uses the adapter, while the live view shows the model. An unloaded adapter is deselected."""
    made = adapters.products(tiny_reference(), adapters.ALL, 2, seed=0)
    folders = {name: adapters.write_mlx_lm(tmp_path / name, made) for name in ("sql", "poet")}
    engine = in_thread(lambda: adapters.adapted_engine(folders))
    asked: list[str] = []

    def note(request: Request) -> None:
        if request.method == "POST":
            asked.append(json.loads(request.post_data or "").get("model"))

    with serve(engine=engine, names=("base",)) as served, page_of(browser, served) as page:
        page.wait_for_selector("#models:not([hidden])")
        options = page.locator("#model-pick option")
        assert options.all_inner_texts() == ["base (model)", "sql (adapter)", "poet (adapter)"]
        page.on("request", note)
        page.click("#settings-open")
        page.get_by_label("Tokens at most").fill("4")
        ask(page, "hello")
        page.select_option("#model-pick", "poet")
        ask(page, "hello again", 2)
        assert asked == ["base", "poet"]
        assert page.inner_text("#connection") == "live" and page.inner_text("#model").startswith("base ·")
        assert served.post("/v1/completions", {"model": "poet", "prompt": "x"}).status_code == 200
        assert engine.adapters is not None and engine.adapters.unload("poet")
        page.evaluate("dispatchEvent(new Event('focus'))")
        page.wait_for_function("() => document.querySelector('#model-pick').value === 'base'")
        assert options.all_inner_texts() == ["base (model)", "sql (adapter)"]


@pytest.mark.full
def test_the_bar_of_memory_has_adapters(browser: Browser) -> None:
    config = fake_config()
    config = replace(config, model=replace(config.model, adapter_bytes=3 << 20))
    with serve(config=config) as served, page_of(browser, served) as page:
        assert "adapters 3.0 MiB" in page.inner_text("#memory-text")
        assert page.locator("#memory-bar [title='adapters: 3.0 MiB']").count() == 1
