"""Checks on every HTTP request, before its endpoint runs."""
