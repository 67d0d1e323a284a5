"""Numba code. Everything here compiles on first use and is cached on disk by Numba."""
