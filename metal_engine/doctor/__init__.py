"""``metal-engine doctor``: examines a machine, and checks the engine on it."""
