"""Constrained output: compiles grammars in separate processes, and computes the masks of allowed tokens."""
