"""Arrays of the KV cache and of recurrent states, and how a step reads and writes them."""
