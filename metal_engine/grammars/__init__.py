"""Constrained output: grammars, their processes, and the masks of allowed tokens."""
