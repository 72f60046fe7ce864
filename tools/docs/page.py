"""Takes the screenshots of the server's page for README.md and docs/cli.md: ``python -m tools.docs.page``.

Serves the demo model with a small KV cache, sends two questions, fills the cache, and takes pictures with a headless
Chromium: docs/images/page-light.png, page-dark.png and page-phone.png. Takes a minute on two idle cores. Other
programs would change the times in the pictures.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.loading.build import build_engine
from metal_engine.server.listen import listen
from metal_engine.server.run import run_server
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs
from tools.fixtures.browser import find_chromium, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ViewportSize

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
QUESTION = "What is the capital of France?"
FOLLOW_UP = "Why is the sky blue?"
DESK: ViewportSize = {"width": 1360, "height": 850}
PHONE: ViewportSize = {"width": 390, "height": 800}
# Maximum wait for the page, in milliseconds. The model runs on a CPU.
PATIENCE = 300_000


def ask(page: object, text: str, number: int) -> None:
    from playwright.sync_api import Page

    assert isinstance(page, Page)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    done = "n => document.querySelectorAll('.message.assistant').length >= n && !document.querySelector('#send').hidden"
    page.wait_for_function(done, arg=number)


def pictures(browser: Browser, url: str) -> None:
    """Open the server's page, ask two questions, fill the cache, and write three screenshots to ``IMAGES``.

    The screenshots show the same page in the light theme, in the dark theme, and on a phone.
    """
    page = browser.new_page(viewport=DESK, color_scheme="light")
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.wait_for_selector("#connection[data-state=live]")
    ask(page, QUESTION, 1)
    ask(page, FOLLOW_UP, 2)
    page.click("#demo-eight")
    page.wait_for_selector("#demo-stop", state="hidden")
    page.click("#demo-fill")
    # Wait until the cache is full and the latest requests have been preempted, and then some seconds more.
    page.wait_for_function("() => document.querySelector('#blocks-text').textContent.includes(' 0 free')")
    page.wait_for_function("() => /· [2-9]/.test(document.querySelector('.chart .value').textContent)")
    page.wait_for_timeout(4000)
    page.screenshot(path=IMAGES / "page-light.png")
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=IMAGES / "page-dark.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(PHONE)
    page.screenshot(path=IMAGES / "page-phone.png")
    page.click("#tab-live")
    page.click("#demo-stop")
    page.wait_for_selector("#demo-stop", state="hidden")


def main() -> None:
    executable = find_chromium()
    if executable is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    args = EngineArgs(model="demo", num_gpu_blocks_override=160, max_num_seqs=12, max_num_batched_tokens=256)
    engine = AsyncEngine(EngineThread(lambda: build_engine(args)))
    engine.start()
    ready: list[str] = []
    is_ready = threading.Event()

    def on_ready(url: str) -> None:
        ready.append(url)
        is_ready.set()

    with listen(ServerArgs(port=0)) as listener:
        served = threading.Thread(
            target=run_server, args=(engine, ServerArgs(port=0), ("demo",), listener, on_ready), daemon=True
        )
        served.start()
        is_ready.wait()
        with open_browser(executable) as browser:
            pictures(browser, ready[0])


if __name__ == "__main__":
    main()
