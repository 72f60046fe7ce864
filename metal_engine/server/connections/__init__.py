"""Connections of HTTP clients: accepting, limits and closing."""
