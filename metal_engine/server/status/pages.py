"""Generates the HTML page at ``/docs``, which describes the API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

# Links in the JSON response of `/`.
LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/health",
    "metrics": "/metrics",
}
# The page loads no other resources.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 13px ui-monospace, monospace; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886; }
h3 { margin: 1.8rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8883; }
td:first-child { white-space: nowrap; }
"""

_BETWEEN_QUOTES = re.compile("``(.+?)``")

Schema = Mapping[str, Any]


def _page(title: str, parts: Iterator[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{"".join(parts)}</body></html>'
    )


def api_page(schema: Schema) -> str:
    """Return the page at ``/docs`` for an OpenAPI schema."""
    return _page(f"{schema['info']['title']}: API", _api(schema))


def _api(schema: Schema) -> Iterator[str]:
    info = schema["info"]
    yield f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
    yield '<p>All paths, then all types. <a href="/openapi.json">The same for programs</a>.</p>'
    by_tag: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault((operation.get("tags") or ["other"])[0], []).append((method, path, operation))
    for tag, listed in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>"
        for method, path, operation in listed:
            yield from _operation(method, path, operation)
    yield "<h2>Types</h2>"
    for name, one in schema.get("components", {}).get("schemas", {}).items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3>{_text(one.get("description", ""))}'
        yield _fields(one) if one.get("properties") else f"<p>{_type(one)}</p>"


def _operation(method: str, path: str, operation: Schema) -> Iterator[str]:
    yield f"<h3>{_code(f'{method.upper()} {path}')}</h3>{_text(operation.get('description', ''))}<table>"
    for parameter in operation.get("parameters", ()):
        yield _row(parameter["name"], _type(parameter["schema"]), f"in the {parameter['in']}")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield _row("body", _type(content.get("schema", {})), kind)
    for status, response in operation["responses"].items():
        for kind, content in response.get("content", {}).items():
            yield _row(status, _type(content.get("schema", {})), kind)
    yield "</table>"


def _fields(schema: Schema) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema["properties"].items():
        default = field.get("default")
        note = "required" if name in required else "" if default is None else f"{json.dumps(default)} if not given"
        rows.append(_row(name, _type(field), note))
    return f"<table>{''.join(rows)}</table>"


def _row(name: str, type_: str, note: str) -> str:
    return f"<tr><td>{_code(name)}</td><td>{type_}</td><td>{escape(note)}</td></tr>"


def _type(schema: Schema) -> str:
    """Return HTML that describes a type in words, with links to named types."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for kind in ("anyOf", "oneOf"):
        if kind in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[kind]))
    if "allOf" in schema:
        return " and ".join(_type(one) for one in schema["allOf"])
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return " or ".join(_code(json.dumps(value)) for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    inner = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(inner, Mapping) and inner:
        return f"object of {_type(inner)}"
    return escape(str(schema.get("type", "any")))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _text(text: str) -> str:
    """Return a description as HTML paragraphs. Text between double backquotes becomes code."""
    shown = _BETWEEN_QUOTES.sub(r"<code>\1</code>", escape(text))
    return "".join(f"<p>{part}</p>" for part in shown.split("\n\n") if part.strip())
