"""Fails early and clearly without a clang."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def clang() -> str:
    from tools.metal_sim.toolchain import clang

    return clang()
