"""Makes the repository's ``tools`` importable, and fails early and clearly without a clang."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


@pytest.fixture(scope="session", autouse=True)
def clang() -> str:
    from tools.metal_sim.toolchain import clang

    return clang()
