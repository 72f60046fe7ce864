"""Rejects requests with an effect, such as a generation, if a web page of another origin sends them.

Such a page cannot read the response. However, a browser sends some requests without a CORS preflight: pictures, forms
and scripts. Browsers mark these requests with ``Sec-Fetch-Site``, which pages cannot change.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_engine.server.errors import APIError
from metal_engine.server.refusal import refuse
from metal_engine.settings.server_args import ServerArgs

# Value in --allowed-origins that allows every origin.
ANY = "*"
# Header of all requests of the server's own page. A page of another origin cannot send it without a CORS preflight.
FROM_OWN_PAGE = "x-metal-engine-page"
# Methods without an effect, except on the paths in `guarded_paths`.
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
# Requests of the page itself, and of addresses that the user typed.
_OWN_SITES = frozenset({"same-origin", "none"})


def own_origins_only(app: ASGIApp, args: ServerArgs, guarded_paths: Collection[str]) -> ASGIApp:
    """Wrap ``app``: reject requests that have an effect and come from a page of another origin, with status 403.

    All requests have an effect, except GET, HEAD and OPTIONS on other paths than ``guarded_paths``.

    Args:
        args: server settings. Origins in ``allowed_origins`` may send all requests.
        guarded_paths: paths on which GET requests have an effect, too.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_read = scope["method"] in _READS
            if (not is_read or scope["path"] in guarded_paths) and not _is_own(scope, args.allowed_origins, is_read):
                await refuse(_refusal(), scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _is_own(scope: Scope, allowed: Collection[str], is_read: bool) -> bool:
    """Return False if the request comes from a web page of an origin that is not allowed."""
    headers = Headers(scope=scope)
    if ANY in allowed or headers.get("origin") in allowed:
        return True
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in _OWN_SITES
    # Without TLS, browsers send Sec-Fetch-Site only to localhost. Over a network, a read must have the page's own
    # header. Pages of other origins can send neither JSON nor DELETE. The only other write that has an effect cancels a
    # response, whose id is not known to such a page.
    is_browser = headers.get("user-agent", "").startswith("Mozilla/")
    return not (is_read and is_browser) or FROM_OWN_PAGE in headers


def _refusal() -> APIError:
    problem = "a web page of another origin may not send this request; start the server with --allowed-origins ORIGIN"
    return APIError(403, f"{problem} to allow that", code="origin_not_allowed", headers={"connection": "close"})
