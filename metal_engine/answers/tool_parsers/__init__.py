"""Parsers of tool calls that no grammar has constrained. They accept common mistakes of models."""
