"""Kernels compiled ahead of time as far as LLVM IR, so that a first decode need not wait for a
compiler front end.

``<instruction set>.zip`` holds optimised IR of the decode kernels, made by ``tools/ahead.py`` from
the sources in ``cpu/kernels``. ``load`` turns one into machine code with llvmlite in some
milliseconds, for the CPU it runs on. A bundle that is missing, stale or unreadable for this
llvmlite means that Numba compiles the same source instead.
"""
