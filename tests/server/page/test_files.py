"""Files of the page: types, response headers, and permitted imports."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import PurePosixPath

import httpx
import pytest

from metal_engine import __version__
from metal_engine.server.page.files import INDEX, PREFIX, STATIC, load_files
from metal_engine.server.status.pages import LINKS
from metal_engine.settings.server_args import ServerArgs
from tests.support.serving import DEADLINE, MODEL, Served, serve

CLIENT = httpx.Client(timeout=DEADLINE)  # shared, because making a client takes longer than a request
HTML = {"accept": "text/html,application/xhtml+xml;q=0.9"}
FILES = sorted(load_files())


class Page(HTMLParser):
    """Elements of a page, which must be closed, and have ids of their own and nothing inline."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        self.tags: set[str] = set()
        self.loaded: list[str] = []  # URLs that the page loads
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(response.text)
        assert not self.open and len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert not any(name.startswith("on") or name == "style" for name in given), f"inline: {tag} {given}"
        self.tags.add(tag)
        self.loaded += [given["src"]] if "src" in given else []
        (self.loaded if tag == "link" else self.links).extend([given["href"]] if "href" in given else [])
        self.ids += [given["id"]] if "id" in given else []
        self.open += [] if tag in ("meta", "link", "input", "img", "br") else [tag]

    def handle_data(self, data: str) -> None:
        assert self.open[-1:] != ["script"] or not data.strip(), "inline"
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page(served: Served) -> None:
    page = Page(CLIENT.get(served.url + "/", headers=HTML))
    assert set(LINKS.values()) <= set(page.links)
    for path in page.loaded:
        assert path.startswith(PREFIX) and CLIENT.get(served.url + path).status_code == 200


def test_the_page_for_programs(served: Served) -> None:
    for headers in ({}, {"accept": "application/json"}):
        answer = CLIENT.get(served.url + "/", headers=headers).json()
        assert answer == {"name": "metal-engine", "version": __version__, "models": [MODEL], "links": LINKS}
    for link in LINKS.values():
        assert CLIENT.get(served.url + link).status_code == 200


def test_every_file_is_served_with_the_policy(served: Served) -> None:
    for name in FILES:
        path = "/" if name == INDEX else PREFIX + name
        response = CLIENT.get(served.url + path, headers=HTML)
        assert response.status_code == 200 and response.content == (STATIC / name).read_bytes(), name
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        again = CLIENT.get(served.url + path, headers={**HTML, "if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_page_files_load_only_files_of_the_page() -> None:
    """Imports are of existing files, and styles load no files."""
    for name in FILES:
        text = (STATIC / name).read_text(encoding="utf-8")
        if name.endswith(".css"):
            assert "url(" not in text and "@import" not in text
        if name.endswith((".js", ".mjs")):
            folder = PurePosixPath(name).parent
            for target in re.findall(r"""^(?:import|export)\b[^'"]*?from\s*['"]([^'"]+)['"]""", text, re.MULTILINE):
                assert target.startswith("."), f"{name} imports {target}"
                parts: list[str] = []
                for part in (*folder.parts, *target.split("/")):
                    parts = parts[:-1] if part == ".." else parts if part == "." else [*parts, part]
                assert "/".join(parts) in FILES, f"{name} imports {target}"


def test_the_files_are_small_and_name_their_licences() -> None:
    assert sum((STATIC / name).stat().st_size for name in FILES) < 600_000
    everything = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert everything == set(FILES), "a file that is not served"
    notes = (STATIC / "vendor" / "README.txt").read_text(encoding="utf-8")
    for name in FILES:
        if name.startswith("vendor/") and name.endswith("js"):
            assert PurePosixPath(name).name in notes
    ours = [name for name in FILES if not name.startswith("vendor/")]
    assert all(len((STATIC / name).read_text(encoding="utf-8").splitlines()) <= 400 for name in ours)


def test_the_page_is_public_and_the_data_requires_the_key() -> None:
    with serve(args=ServerArgs(api_key=("k",))) as served:
        for path in ("/", PREFIX + "js/main.js"):
            for method in ("GET", "HEAD"):
                assert CLIENT.request(method, served.url + path, headers=HTML).status_code == 200
        assert MODEL not in CLIENT.get(served.url + "/", headers=HTML).text
        for path in ("/", "/watch", "/v1/models", "/docs", "/redoc", "/tokenizer_info", "/page"):
            for method in ("GET", "HEAD"):
                assert CLIENT.request(method, served.url + path).status_code == 401
        assert CLIENT.head(served.url + "/health").status_code == 200
        assert CLIENT.head(served.url + "/v1/models", headers={"x-api-key": "k"}).status_code == 200
        assert CLIENT.get(served.url + "/watch?seconds=0", headers={"authorization": "Bearer k"}).status_code == 200
    with serve() as served:
        for path in ("/", "/watch", "/docs", PREFIX + "js/main.js"):
            assert CLIENT.get(served.url + path, headers={"host": "evil.example", **HTML}).status_code == 403


@pytest.mark.parametrize("path", ["index.html", "../routes.py", "%2e%2e/routes.py", "js", "js/", "", "js/main.js/x"])
def test_other_paths_are_not_there(served: Served, path: str) -> None:
    assert CLIENT.get(served.url + PREFIX + path).status_code == 404
