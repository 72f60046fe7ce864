"""Reads the type of a server's KV cache from its ``/metrics``."""

from __future__ import annotations

import re

import aiohttp

_INFO = re.compile(r"^\w+:engine_info\{(.*)\} \S+$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def server_kv_cache_dtype(session: aiohttp.ClientSession, base_url: str, model: str) -> str | None:
    """Return the type of the KV cache, such as ``int8`` or ``bfloat16``; None if the server does not report it.

    Args:
        model: name of the requested model, for a server with several models.
    """
    try:
        async with session.get(f"{base_url.rstrip('/')}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return None
    return parse_kv_cache_dtype(text, model)


def parse_kv_cache_dtype(text: str, model: str) -> str | None:
    """Parse the type from metrics in Prometheus format, for the named model or the only one."""
    found = [dict(_LABEL.findall(labels)) for labels in _INFO.findall(text)]
    named = [labels for labels in found if labels.get("model_name") == model]
    ours = named or (found if len(found) == 1 else [])
    return ours[0].get("kv_cache_dtype") if ours else None
