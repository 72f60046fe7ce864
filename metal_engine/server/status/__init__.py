"""Endpoints about the server itself: health, metrics and models."""
