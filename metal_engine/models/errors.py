"""Errors of loading a model."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model cannot be loaded. The message is one line and says what to do about it."""


class UnsupportedModelError(ModelLoadError):
    """The architecture cannot run here; the message names it and the reason."""
