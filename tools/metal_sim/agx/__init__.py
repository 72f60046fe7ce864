"""Mesa's compiler for the GPUs of M1 and M2, run without such a GPU: registers, spills and code of every kernel.

``packages`` fetches Debian's packages into a private root. ``spirv`` turns a kernel's text into SPIR-V. ``mesa``
compiles SPIR-V to machine code, over a stand-in for the kernel driver (``device.c``). ``listing`` reads what the
compiler prints. ``measure`` does all of this for the engine's kernel variants, and ``table`` shows the results.
"""
