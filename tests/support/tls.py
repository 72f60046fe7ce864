"""A certificate for servers of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a key and a certificate for ``localhost`` in a folder. Return their paths."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert
