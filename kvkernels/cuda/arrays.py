"""Callers' arrays as CuPy's: CuPy, PyTorch, JAX, Numba and whatever speaks DLPack or
``__cuda_array_interface__``. Nothing is copied, nothing but CuPy is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from kvkernels.errors import InputError
from kvkernels.simt.driver import Seen
from kvkernels.simt.probing import text_of

#: DLPack's numbers of CUDA memory, and of managed memory
_DL_CUDA = (2, 13)
BF16 = np.dtype(ml_dtypes.bfloat16)


def see(cupy: Any, index: int, field: str, array: Any) -> Seen:
    """``array`` as a C-contiguous CuPy array on card ``index``; InputError naming ``field``."""
    found = array if isinstance(array, cupy.ndarray) else _taken(cupy, index, field, array)
    if int(found.device.id) != index:
        _elsewhere(index, field, f"an array on cuda:{int(found.device.id)}")
    if not found.flags.c_contiguous:
        raise InputError(
            field,
            found=f"strides {tuple(found.strides)} of shape {tuple(found.shape)}",
            needed="a C-contiguous array",
            hint="Pass cupy.ascontiguousarray(x), or x.contiguous() of a torch tensor",
        )
    return Seen(found, tuple(found.shape), found.dtype.name)


def _taken(cupy: Any, index: int, field: str, array: Any) -> Any:
    if not hasattr(array, "__dlpack_device__") and not hasattr(array, "__cuda_array_interface__"):
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        _elsewhere(index, field, kind.removeprefix("builtins."))
    if hasattr(array, "__dlpack_device__"):
        memory, number = (int(part) for part in array.__dlpack_device__())
        if memory not in _DL_CUDA:
            what = f"{type(array).__module__}.{type(array).__qualname__}"
            _elsewhere(index, field, f"{what} in memory of another kind (DLPack device {memory})")
        # Asked before CuPy is: it would copy from another card.
        if number != index:
            _elsewhere(index, field, f"an array on cuda:{number}")
    view = _torch_bits(array)
    try:
        if hasattr(array, "__dlpack__"):
            taken = cupy.from_dlpack(array if view is None else view)
        else:
            taken = cupy.asarray(array)
    except Exception as error:
        raise InputError(
            field,
            found=f"{type(array).__qualname__} that CuPy does not take ({text_of(error)})",
            needed="float32, float16 or bfloat16 on this card",
            hint="Detach tensors that require gradients",
        ) from None
    return taken if view is None else taken.view(BF16)


def _torch_bits(array: Any) -> Any:
    """A torch tensor of bfloat16 as int16 of the same bits, which every CuPy takes; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor) or array.dtype != torch.bfloat16:
        return None
    return array.detach().view(torch.int16)


def _elsewhere(index: int, field: str, found: str) -> None:
    raise InputError(
        field,
        found=found,
        needed=f"an array on cuda:{index}",
        hint=f"Move it there, as with cupy.asarray(x) or x.to('cuda:{index}')",
    )
