"""Arrays in the memory of an AMD card, and callers' arrays seen as such."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError

_BF16 = np.dtype(ml_dtypes.bfloat16)
_TORCH = {"torch.float32": np.dtype("f4"), "torch.float16": np.dtype("f2"), "torch.bfloat16": _BF16}


class HipArray:
    """C-contiguous memory at ``ptr``; ``owner`` keeps it. CuPy and PyTorch for ROCm take it by
    ``__cuda_array_interface__``. What is enqueued for it is on the null stream.
    """

    flags = SimpleNamespace(c_contiguous=True, writeable=True)

    def __init__(
        self, driver: Any, ptr: int, shape: tuple[int, ...], dtype: Any, owner: Any = None
    ) -> None:
        self.driver, self.ptr, self.owner = driver, ptr, owner
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.size * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.ptr, False),
            "strides": None, "version": 3,
        }  # fmt: skip

    def get(self) -> NDArray[Any]:
        """The values in host memory; waits for what was enqueued."""
        found: NDArray[Any] = self.driver.download(self)
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.get()[index]


def see(driver: Any, field: str, array: Any) -> HipArray:
    """A caller's array as a HipArray on the driver's card, without a copy. Raises InputError."""
    index = driver.index
    if isinstance(array, HipArray):
        if array.driver.index != index:
            _elsewhere(index, field, f"an array on hip:{array.driver.index}")
        return array
    ptr, shape, dtype, contiguous = _described(index, field, array)
    if not contiguous:
        raise InputError(
            field,
            found=f"a strided array of shape {shape}",
            needed="a C-contiguous array",
            hint="Pass x.contiguous() of a torch tensor, or cupy.ascontiguousarray(x)",
        )
    where = driver.card_of(ptr) if prod(shape) else index
    if where != index:
        _elsewhere(
            index, field, "memory of no card" if where is None else f"an array on hip:{where}"
        )
    return HipArray(driver, ptr, shape, dtype, array)


def _described(index: int, field: str, array: Any) -> tuple[int, tuple[int, ...], Any, bool]:
    """Pointer, shape, dtype, and whether it is C-contiguous."""
    if callable(getattr(array, "data_ptr", None)) and str(array.dtype) in _TORCH:
        if array.device.type != "cuda":  # what PyTorch calls AMD cards too
            _elsewhere(index, field, f"a tensor on {array.device}")
        shape = tuple(int(n) for n in array.shape)
        return int(array.data_ptr()), shape, _TORCH[str(array.dtype)], bool(array.is_contiguous())
    face = getattr(array, "__cuda_array_interface__", None)
    if face is None:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        _elsewhere(index, field, kind.removeprefix("builtins."))
        raise AssertionError  # pragma: no cover
    named = str(getattr(array, "dtype", ""))
    dtype = _BF16 if named == "bfloat16" else np.dtype(face["typestr"])
    shape = tuple(int(n) for n in face["shape"])
    steps = tuple(prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape)))
    strides = face.get("strides")
    contiguous = strides is None or 0 in shape or tuple(strides) == steps
    return int(face["data"][0]), shape, dtype, contiguous


def _elsewhere(index: int, field: str, found: str) -> None:
    raise InputError(
        field,
        found=found,
        needed=f"an array on hip:{index}",
        hint=f"Pass x.to('cuda:{index}') of PyTorch for ROCm, a CuPy array, or device.upload(x)",
    )
