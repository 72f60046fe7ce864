"""Recurrences of Mamba 2 and of gated delta networks over a packed step."""
