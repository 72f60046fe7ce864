"""The BLAS library that MLX's CPU backend calls, and its threads."""
