"""TLS of downloads: the trusted certificates."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress


def download_tls_context() -> ssl.SSLContext:
    """Return a context that trusts the system's certificates, or the ``certifi`` package's if Python finds none.

    Python from python.org finds none on macOS.
    """
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and (paths.capath is None or not os.listdir(paths.capath)):
        with suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context
