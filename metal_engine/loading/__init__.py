"""Loads a model and builds its engine: checks, memory estimates, drafts, and the image encoder."""
