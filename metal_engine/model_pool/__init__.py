"""Several models in one server: loading on demand, and unloading within the memory budget."""
