"""Layers with recurrent state, such as Mamba and gated delta networks, in packed steps."""
