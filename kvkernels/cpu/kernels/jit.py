"""How this package compiles: one decorator for kernels, one for the pointer-called micro-kernels.

Numba stamps a cached binary with the hash of the *one* file that defines the function, so editing
(or upgrading) ``simd.py`` would leave stale machine code of its callers in the cache. Here every
cached function is stamped with a hash over all kernel sources instead.
"""

from numba import cfunc, njit

from kvkernels.cpu.kernels.stamp import source_stamp


def _restamp(compiled):
    cache_file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    # Not public in Numba: without the attribute the stamp stays per file, which only a developer
    # notices.
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = source_stamp()
    return compiled


_FAST = {"contract", "nsz"}


def kernel(function):
    """An entry: called from Python, compiled for speed, cached. nogil, no bounds checks.

    a * b + c may contract to fma; nothing may reassociate.
    """
    return _restamp(
        njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST, no_cfunc_wrapper=True)(
            function
        )
    )


def exact_kernel(function):
    """Like :func:`kernel`, but every IEEE operation is done as written:
    for whatever decides bytes.
    """
    return _restamp(
        njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    )


_INNER = {
    # Passing arrays costs a call some dozens of words on the stack, more than many parts compute.
    "forceinline": True,
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def inner(function):
    """Part of a :func:`kernel`, not callable from Python and with no cache entry of its own."""
    return njit(fastmath=_FAST, **_INNER)(function)


def exact_inner(function):
    """Part of an :func:`exact_kernel`."""
    return njit(**_INNER)(function)


def callback(signature):
    """A C-callable function of raw pointers, called through its address (see ``dot.call_dot``)."""

    def wrap(function):
        return _restamp(cfunc(signature, cache=True, nopython=True)(function))

    return wrap
