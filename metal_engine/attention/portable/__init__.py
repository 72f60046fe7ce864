"""Attention by MLX's operations, which runs on every device."""
