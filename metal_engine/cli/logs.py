"""Sets up the logging of all commands."""

from __future__ import annotations

import logging
import sys


def set_up_logging(level: str, style: str = "text") -> None:
    """Log this package's messages from ``level`` upward, and other packages' warnings, to standard error.

    Args:
        level: minimum severity, as in ``--log-level``.
        style: ``json`` for one object per line. ``text`` is coloured on a terminal.
    """
    handler: logging.Handler = logging.StreamHandler()
    if style == "json":
        from metal_engine.server.logs import JSONFormatter, RequestIdFilter

        handler.setFormatter(JSONFormatter())
        handler.addFilter(RequestIdFilter())
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%H:%M:%S]")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level="WARNING", handlers=[handler])
    logging.getLogger("metal_engine").setLevel(level.upper())
