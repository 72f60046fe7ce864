"""Parsers that split a model's output into reasoning, content and tool calls, by the model's output format."""
