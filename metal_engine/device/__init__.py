"""Access to the machine: memory, kernels, compiled programs, BLAS and private folders."""
