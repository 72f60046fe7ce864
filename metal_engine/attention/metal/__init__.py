"""Attention by the Metal kernels: work items of a step, variants of a kernel, and launches."""
