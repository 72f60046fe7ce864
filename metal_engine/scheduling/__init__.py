"""Plans each step: tokens of each request, blocks of the KV cache, and slots of recurrent states."""
