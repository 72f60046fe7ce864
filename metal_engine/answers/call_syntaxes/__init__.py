"""Exact forms of tool calls, each with a grammar for the model's output and a reader for it."""
