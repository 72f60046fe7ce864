"""Images in the page's chat, in a real browser: how they are added, shown, sent, stored and refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metal_engine.settings.server_args import ServerArgs
from tests.support.browsing import ask, page_of, texts, wait_for_answer
from tests.support.image_files import data_url, encoded, picture
from tests.support.image_serving import serve_seeing
from tests.support.serving import Served, serve
from tools.fixtures.fake_engine import script

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

# Files of 48 and of 16 tokens.
A, B = encoded(picture(64, 48, 1)), encoded(picture(32, 32, 2), "JPEG")
URL_A, URL_B = data_url(A), data_url(B, "image/jpeg")
FILE_A = {"name": "a.png", "mimeType": "image/png", "buffer": A}
FILE_B = {"name": "b.jpg", "mimeType": "image/jpeg", "buffer": B}
BROKEN = {"name": "broken.png", "mimeType": "image/png", "buffer": A[:100]}


@pytest.fixture(scope="module")
def seeing() -> Iterator[Served]:
    with serve_seeing(max_model_len=1024, num_blocks=512) as served:
        served.runner.next_token = script("yes")
        yield served


@pytest.fixture
def page(browser: Browser, seeing: Served) -> Iterator[Page]:
    with page_of(browser, seeing) as page:
        yield page


def choose(page: Page, *files: Any) -> None:
    """Choose files with the button of the composer."""
    with page.expect_file_chooser() as chooser:
        page.click("#image-add")
    chooser.value.set_files(list(files))


def large_file(folder: Path, name: str, num_mebibytes: float) -> Path:
    """Write an image file of this size. Browsers read files faster from a path than from the test."""
    (folder / name).write_bytes(A + bytes(int(num_mebibytes * (1 << 20))))
    return folder / name


def give(page: Page, kind: str, *files: dict[str, Any], text: str = "") -> bool:
    """Paste or drop files on the page. Return True if the page prevents the browser's own reaction."""
    given = [{"name": f["name"], "type": f["mimeType"], "data": base64.b64encode(f["buffer"]).decode()} for f in files]
    return page.evaluate(  # type: ignore[no-any-return]
        """([kind, files, text]) => {
            const data = new DataTransfer();
            for (const { name, type, data: base64 } of files) {
                const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
                data.items.add(new File([bytes], name, { type }));
            }
            if (text) data.setData("text/plain", text);
            const common = { bubbles: true, cancelable: true };
            const event = kind === "paste"
                ? new ClipboardEvent("paste", { clipboardData: data, ...common })
                : new DragEvent(kind, { dataTransfer: data, ...common });
            return !document.querySelector("#prompt").dispatchEvent(event);
        }""",
        [kind, given, text],
    )


def attached(page: Page) -> list[str | None]:
    page.wait_for_function(
        "() => ![...document.querySelectorAll('#attached .image')].some((i) => !i.querySelector('img'))"
    )
    return [image.get_attribute("alt") for image in page.locator("#attached img").all()]


def shown(page: Page) -> list[list[str | None]]:
    """Return the names of the images of each user message, once their thumbnails are shown."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('.message .image')].every((i) => i.querySelector('img')?.naturalWidth)"
    )
    messages = page.locator(".message.user").all()
    return [[image.get_attribute("alt") for image in message.locator("img").all()] for message in messages]


def sent(page: Page) -> list[Any]:
    """Return a list that grows by the content of the last message of each request from now on."""
    contents: list[Any] = []

    def record(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            contents.append(request.post_data_json["messages"][-1]["content"])

    page.on("request", record)
    return contents


def parts(*urls: str, text: str = "") -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": text}] if text else images


def stored(page: Page) -> list[str]:
    """Return the ids of the images in the browser's storage."""
    return page.evaluate(  # type: ignore[no-any-return]
        """() => new Promise((resolve) => {
            indexedDB.open("metal-engine", 1).onsuccess = ({ target: { result: database } }) => {
                const request = database.transaction("images").objectStore("images").getAllKeys();
                request.onsuccess = () => { database.close(); resolve(request.result); };
            };
        })"""
    )


def wait_until_stored(page: Page, number: int, *, but: str = "") -> str:
    """Wait until ``number`` images are stored, without the image ``but``. Return the id of the oldest image."""
    for _ in range(300):
        ids = stored(page)
        if len(ids) == number and but not in ids:
            return ids[0]
        page.wait_for_timeout(100)
    raise AssertionError(f"{stored(page)} are stored, not {number} images")


def test_images_are_chosen_removed_shown_and_sent(page: Page) -> None:
    contents = sent(page)
    choose(page, FILE_A, FILE_B)
    choose(page, FILE_A)
    assert attached(page) == ["a.png", "b.jpg", "a.png"]
    page.get_by_label("Remove a.png").first.click()
    assert attached(page) == ["b.jpg", "a.png"]
    ask(page, "What is this?")
    assert contents == [parts(URL_B, URL_A, text="What is this?")]
    assert shown(page) == [["b.jpg", "a.png"]] and attached(page) == []
    assert "64 image tokens" in page.locator(".message.assistant .figures").inner_text()
    ask(page, "And now?", 2)
    assert contents[1] == "And now?"
    assert "64 image tokens" in page.locator(".message.assistant .figures").last.inner_text()


def test_images_without_text_name_the_conversation(page: Page) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    contents = sent(page)
    choose(page, FILE_A)
    assert attached(page) == ["a.png"] and not axe.run(page).response["violations"]
    page.press("#prompt", "Enter")
    wait_for_answer(page)
    assert contents == [parts(URL_A)] and texts(page, "#conversations option") == ["a.png"]
    assert not page.locator(".message.user .body").is_visible() and shown(page) == [["a.png"]]
    page.get_by_label("Edit and send again").click()
    assert not axe.run(page).response["violations"]


def test_images_are_pasted_and_dropped(page: Page) -> None:
    assert give(page, "paste", FILE_A)
    assert give(page, "dragover", FILE_B) and give(page, "drop", FILE_B, FILE_A)
    assert not give(page, "paste", FILE_A, text="a cell of a table")  # with a picture of the text
    assert not give(page, "drop", text="a text")
    assert attached(page) == ["a.png", "b.jpg", "a.png"]
    assert give(page, "drop", {**FILE_A, "name": "a.heic", "mimeType": "image/heic"})
    assert texts(page, "#image-note") == ["a.heic is not a PNG, JPEG, WebP or GIF image."]
    assert attached(page) == ["a.png", "b.jpg", "a.png"]


@pytest.mark.full
def test_branches_keep_their_images(page: Page) -> None:
    contents = sent(page)
    choose(page, FILE_A, FILE_B)
    ask(page, "First")
    page.get_by_label("Answer again").click()
    wait_for_answer(page)
    page.get_by_label("Edit and send again").click()
    page.locator(".edit textarea").fill("Other")
    page.get_by_role("button", name="Send again", exact=True).click()
    wait_for_answer(page)
    page.get_by_label("Edit and send again").click()
    page.locator(".message.user").get_by_label("Remove a.png").click()
    page.get_by_role("button", name="Send again", exact=True).click()
    wait_for_answer(page)
    first, other = parts(URL_A, URL_B, text="First"), parts(URL_A, URL_B, text="Other")
    assert contents == [first, first, other, parts(URL_B, text="Other")]
    wait_until_stored(page, 2)
    page.reload()
    assert shown(page) == [["b.jpg"]]
    page.get_by_label("Branch before").first.click()
    assert shown(page) == [["a.png", "b.jpg"]]
    page.get_by_label("Answer again").click()
    wait_for_answer(page)
    assert contents[-1] == other  # from the browser's storage


@pytest.mark.full
def test_images_are_deleted_with_their_conversation(page: Page) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    for name in ("One", "Two"):
        page.click("#conversation-new")
        choose(page, FILE_A)
        ask(page, name)
    wait_until_stored(page, 2)
    page.click("#conversation-more summary")
    page.click("#conversation-delete")
    wait_until_stored(page, 1)
    assert shown(page) == [["a.png"]]


def test_a_browser_that_stores_no_more_keeps_the_newest_images(
    browser: Browser, seeing: Served, tmp_path: Path
) -> None:
    with page_of(browser, seeing) as page:
        large = large_file(tmp_path, "large.png", 1.5)
        devtools = page.context.new_cdp_session(page)
        devtools.send("Storage.overrideQuotaForOrigin", {"origin": seeing.url, "quotaSize": 4 << 20})
        contents = sent(page)
        old = ""
        for name in ("Old", "New"):
            page.click("#conversation-new")
            choose(page, large)
            ask(page, name)
            old = wait_until_stored(page, 1, but=old)
        # There is no space for this image: it lasts until the page is closed.
        larger = large_file(tmp_path, "larger.png", 3)
        choose(page, larger)
        ask(page, "More", 2)
        page.get_by_label("Answer again").last.click()
        wait_for_answer(page, 2)
        assert contents[-1] == contents[-2] == parts(data_url(larger.read_bytes()), text="More")
        page.reload()
        page.locator(".message .image", has_text="larger.png: no longer stored").wait_for()
        assert page.locator(".message .image img").count() == 1
        page.get_by_label("Answer again").last.click()
        wait_for_answer(page, 2)
        assert contents[-1] == [{"type": "text", "text": "(This image is no longer available.)"}, *parts(text="More")]
        page.select_option("#conversations", label="Old")
        page.locator(".message .image", has_text="large.png: no longer stored").wait_for()


@pytest.mark.full
def test_the_page_holds_thumbnails_only(page: Page) -> None:
    photo = {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": encoded(picture(3000, 1500), "JPEG")}
    choose(page, photo, {**FILE_A, "name": "wide.png", "buffer": encoded(picture(2000, 16))})
    ask(page, "See")
    shown(page)
    sizes = page.locator(".message img").evaluate_all("all => all.map((i) => [i.naturalWidth, i.naturalHeight])")
    assert sizes == [[320, 160], [320, 3]]
    loaded = """all => Promise.all(all.map(({ src }) => new Promise((resolve) => {
        Object.assign(new Image(), { src, onload: () => resolve(true), onerror: () => resolve(false) });
    })))"""
    assert page.locator(".message img").evaluate_all(loaded) == [False, False]  # their addresses were released


def test_an_error_of_the_server_is_shown_and_the_image_can_be_removed(browser: Browser, tmp_path: Path) -> None:
    with serve_seeing(args=ServerArgs(max_body_size=1 << 20)) as served, page_of(browser, served) as page:
        served.runner.next_token = script("yes")
        refused = ("messages[0].content[0].image_url.url", "broken")
        for file, told in ((BROKEN, refused), (large_file(tmp_path, "large.png", 1), ("--max-body-size",))):
            page.click("#conversation-new")
            choose(page, file)
            ask(page, "See")
            problem = page.locator(".message.assistant .problem").inner_text()
            assert all(words in problem for words in told)
            page.get_by_label("Edit and send again").click()
            page.locator(".message.user").get_by_label("Remove").click()
            page.get_by_role("button", name="Send again", exact=True).click()
            wait_for_answer(page)
            assert texts(page, ".message.assistant .body") == ["yes"]


@pytest.mark.full
def test_images_above_the_server_size_limits_are_not_read(page: Page, tmp_path: Path) -> None:
    contents = sent(page)
    large = large_file(tmp_path, "large.png", 19)
    for _ in range(4):
        choose(page, large)
    choose(page, large_file(tmp_path, "huge.png", 20))
    assert texts(page, "#image-note") == ["huge.png has more than 20 MiB."]
    ask(page, "See")
    problem = page.locator(".message.assistant .problem").inner_text()
    assert problem == "the images up to here have more than 64 MiB" and not contents


def test_the_page_shows_why_the_model_does_not_accept_images(browser: Browser) -> None:
    with serve(script("yes")) as served, page_of(browser, served) as page:
        refusal = served.engine.config.model.image_refusal
        page.click("#image-add")
        assert texts(page, "#image-note") == [f"Images cannot be sent: {refusal}."]
        for kind in ("paste", "drop"):
            assert give(page, kind, FILE_A)
            assert texts(page, "#image-note") == [f"Images cannot be sent: {refusal}."]
        assert page.locator("#attached .image").count() == 0
        ask(page, "Hi")
        assert not page.locator("#image-note").is_visible()


def test_the_tape_counts_image_tokens(browser: Browser) -> None:
    """The prompt is computed in chunks, which cut an image."""
    with serve_seeing(max_num_batched_tokens=64) as served, page_of(browser, served) as page:
        served.runner.next_token = script("yes")
        choose(page, FILE_A, FILE_A, FILE_B)
        ask(page, "What?")
        counted = """async () => (await import("/page/js/main.js")).tape.rows.flatMap((row) => row.segments)
            .map(([, tokens, context, , drafts, images]) => [context, context + tokens, images ?? 0])"""
        page.wait_for_function(f"() => ({counted})().then((all) => all.length > 3)")
        segments = page.evaluate(counted)
        assert sum(images for *_, images in segments) == 48 + 48 + 16
        first, second = segments[:2]
        assert first[1] == 64 and 48 < first[2] < 64 and 0 < second[2] < 64
        page.locator("#tape").focus()
        for _ in range(len(segments)):
            page.keyboard.press("ArrowUp")
        assert f"64 tokens ({first[2]} of images) after 0" in page.locator("#tape-now").inner_text()
