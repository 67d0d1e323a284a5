"""The CPU backend: Numba kernels over records, always native (semantics V4)."""
