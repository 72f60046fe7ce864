"""The chat in a real browser: texts too complex for Markdown, headers and footers of answers, stored conversations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browsing import DESK, PHONE, ask, page_of, say, texts, wait_for_answer
from tests.support.serving import MODEL, serve
from tools.fixtures.fake_engine import fake_config, script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

# Each text stops marked, or takes it many seconds or gigabytes.
TOO_MUCH = {
    "quotes": "> " * 2000 + "the end",
    "lists": "- " * 2000 + "the end",
    "emphasis": "_a" * 31_000,
    "links": "[a]: http://" + "a" * 30_000 + "\n\n" + "[a] " * 8000,
    "long": "word " * 20_000,
}
# Every row is filled up to the number of columns of the first: ten million cells.
WIDE_TABLE = "|a" * 5000 + "|\n" + "|-" * 5000 + "|\n" + "|b\n" * 2000


def keep(page: Page, title: str, *answers: str) -> None:
    """Store a conversation in the browser and reload the page."""
    messages = {"root": {"id": "root", "children": ["0"], "chosen": "0"}}
    for i, text in enumerate(answers):
        after = [str(i + 1)] if i + 1 < len(answers) else []
        answer = {"role": "assistant", "content": text, "reasoning": "", "calls": [], "state": "done"}
        place = {"id": str(i), "parent": str(i - 1) if i else "root", "children": after, "chosen": (after or [None])[0]}
        messages[str(i)] = {**answer, **place}  # type: ignore[dict-item]
    saved = json.dumps({"id": title, "title": title, "messages": messages, "time": 1})
    page.evaluate("([id, saved]) => localStorage.setItem(`metal-engine.conversation.${id}`, saved)", [title, saved])
    page.evaluate("id => localStorage.setItem('metal-engine.current', id)", title)
    page.reload()
    page.wait_for_selector("#connection[data-state=live]")


def test_text_too_complex_for_markdown_is_shown_as_plain_text(browser: Browser) -> None:
    """A stored conversation with these texts leaves the page usable from its first load."""
    with serve(script("**yes**")) as served, page_of(browser, served) as page:
        keep(page, "hostile", *TOO_MUCH.values())
        assert page.locator(".message.assistant .body.plain").all_text_contents() == list(TOO_MUCH.values())
        assert page.locator(".foot", has_text="shown as plain text").count() == len(TOO_MUCH)
        page.click("#conversation-new")
        ask(page, "Go on")
        assert page.locator(".message.assistant .body strong").inner_text() == "yes"


def test_a_streamed_response_too_complex_for_markdown_is_plain_text(browser: Browser) -> None:
    text = TOO_MUCH["quotes"]
    config = fake_config(num_blocks=1024, max_model_len=8192)
    with serve(script(text), config=config) as served, page_of(browser, served) as page:
        ask(page, "Hurt me")
        assert page.locator(".message.assistant .body").text_content() == text


def test_a_table_of_too_many_cells_stays_text(browser: Browser) -> None:
    with serve() as served, page_of(browser, served) as page:
        keep(page, "table", WIDE_TABLE, "|a|b|\n|-|-|\n|1|2|\n")
        first, second = page.locator(".message.assistant .body").all()
        assert first.locator("td").count() == 0 and "|b" in first.inner_text()
        assert second.locator("td").all_inner_texts() == ["1", "2"]


def test_errors_are_marked_and_a_response_is_copied_as_markdown(browser: Browser) -> None:
    text = "# A title\n\nand **more**"
    with serve(script(text)) as served, page_of(browser, served) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page, "Hi")
        page.get_by_label("Copy this answer").click()
        page.wait_for_function("text => navigator.clipboard.readText().then(copied => copied === text)", arg=text)
        page.click("#settings-open")
        page.get_by_label("Tokens at most").fill("1000000")
        ask(page, "More", 2)
        assert page.locator(".message.assistant .problem").count() == 1
        assert page.locator(".message.assistant .ending").count() == 0


def test_an_empty_conversation_has_suggestions_and_answers_have_names(browser: Browser) -> None:
    with serve(script("yes")) as served, page_of(browser, served) as page:
        suggestion = page.locator(".empty button").first
        text = suggestion.inner_text()
        suggestion.click()
        wait_for_answer(page)
        assert texts(page, ".message.user .body") == [text] and page.locator(".empty").count() == 0
        assert page.locator(".message.assistant").get_attribute("aria-label") == MODEL
        page.reload()
        assert texts(page, ".message .who") == ["You", MODEL]


def test_conversations_are_found_named_and_exported(browser: Browser) -> None:
    with serve(script("The **answer**")) as served, page_of(browser, served) as page:
        page.on("dialog", lambda dialog: dialog.accept("My: name"))
        for text in ("About bees", "About bread"):
            page.click("#conversation-new")
            ask(page, text)
        page.click("#search-open")
        page.fill("#search", "ABOUT B")
        assert texts(page, "#search-count") == ["2 conversations"]
        page.fill("#search", "bees")
        page.press("#search", "Enter")
        assert not page.locator("#search-dialog").is_visible()
        assert texts(page, ".message.user .body") == ["About bees"]
        page.click("#conversation-more summary")
        page.click("#conversation-rename")
        # The name persists after the first message is edited.
        page.get_by_label("Edit and send again").first.click()
        page.get_by_role("button", name="Send again", exact=True).click()
        wait_for_answer(page)
        page.reload()
        assert page.locator("#conversations option:checked").inner_text() == "My: name"
        page.click("#conversation-more summary")
        with page.expect_download() as downloaded:
            page.click("#conversation-export")
        assert downloaded.value.suggested_filename == "My name.md"
        exported = Path(downloaded.value.path()).read_text(encoding="utf-8")
        assert exported == f"# My: name\n\n## You\n\nAbout bees\n\n## {MODEL}\n\nThe **answer**\n"


def test_a_new_name_is_not_overwritten_by_a_late_save_of_the_answer_before(browser: Browser) -> None:
    with serve(script("yes")) as served, page_of(browser, served) as page:
        page.on("dialog", lambda dialog: dialog.accept("My name"))
        ask(page, "About bees")
        page.click("#conversation-new")
        page.select_option("#conversations", label="About bees")
        page.click("#conversation-more summary")
        page.click("#conversation-rename")
        page.wait_for_timeout(1500)  # the page saves an answer in progress once a second
        page.reload()
        assert page.locator("#conversations option:checked").inner_text() == "My name"


@pytest.mark.full
def test_a_conversation_deleted_in_the_middle_of_an_answer_stays_deleted(browser: Browser) -> None:
    with serve(step_time=0.01) as served, page_of(browser, served) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        say(page, "Go on")
        page.wait_for_selector(".message.assistant .figures")
        page.click("#conversation-more summary")
        page.click("#conversation-delete")
        page.wait_for_selector("#send:not([hidden])")
        page.reload()
        assert texts(page, "#conversations option") == ["New conversation"]


@pytest.mark.parametrize("recommended", [{}, {"temperature": 0.3, "top_k": 5}], ids=["nothing", "some"])
def test_the_sampling_in_effect_is_shown(browser: Browser, recommended: dict[str, float]) -> None:
    config = fake_config()
    config = replace(config, model=replace(config.model, default_sampling=recommended))
    with serve(script("yes"), config=config) as served, page_of(browser, served) as page:
        temperature = recommended.get("temperature", 0.7)
        shown = "temperature 0.3, top k 5 (the model's)" if recommended else "temperature 0.7 (the page's)"
        assert texts(page, "#sampling") == [f"Sampling: {shown}"]
        page.click("#settings-open")
        assert page.get_by_label("Temperature").get_attribute("placeholder") == str(temperature)
        ask(page, "Hi")
        page.get_by_label("Temperature").fill("1.5")
        page.get_by_label("Temperature").press("Tab")
        assert "temperature 1.5 (yours)" in page.locator("#sampling").inner_text()
        ask(page, "Hi again", 2)
        assert [params.temperature for params in served.runner.seen_params] == [temperature, 1.5]


def test_on_a_phone_the_chat_begins_near_the_top(browser: Browser) -> None:
    with serve() as served, page_of(browser, served, viewport=PHONE) as page:
        place = page.locator("#messages").bounding_box()
        assert place is not None and place["y"] <= 150 and place["height"] > PHONE["height"] / 2


def test_the_new_parts_can_be_used_by_everybody(browser: Browser) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with serve(script("yes")) as served, page_of(browser, served, viewport=DESK) as page:
        page.on("dialog", lambda dialog: dialog.dismiss())
        ask(page, "Hi")
        page.locator("#conversation-more summary").press("Enter")
        assert page.locator("#conversation-rename").is_visible() and not axe.run(page).response["violations"]
        page.keyboard.press("Tab")
        page.keyboard.press("Escape")
        assert not page.locator("#conversation-rename").is_visible()
        page.click("#search-open")
        assert page.evaluate("document.activeElement.id") == "search" and not axe.run(page).response["violations"]
