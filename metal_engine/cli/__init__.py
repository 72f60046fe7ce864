"""The command ``metal-engine``."""
