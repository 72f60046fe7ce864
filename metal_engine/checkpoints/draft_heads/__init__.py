"""Trained draft heads of checkpoints: their files, tensors and quantization."""
