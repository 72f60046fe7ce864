"""Tools that look at the engine from outside: is it set up right, how fast is it."""
