"""Exact forms of tool calls. Each form has a grammar that constrains the model, and a reader of the resulting text."""
