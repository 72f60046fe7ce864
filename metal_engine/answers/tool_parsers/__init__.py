"""Parsers for tool calls that no grammar has constrained. They tolerate what models get wrong."""
