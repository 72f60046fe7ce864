"""An engine in a process of its own: its messages, its supervisor, and its restart after a failure."""
