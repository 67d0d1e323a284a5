"""Which OpenCL devices pyopencl lists, as plain facts; and if none, why not.

``opencl:<index>`` counts the devices of all platforms in the order of the loader. A device of type
``cpu`` is listed like any other, but nothing here or elsewhere chooses a device: it is used only
when it is named (V4). Versions are integers: 1020 is 1.2.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvkernels.backend import BackendStatus
from kvkernels.capabilities import DeviceCaps, Fact, Feature
from kvkernels.simt.probing import Stop, probed, text_of

NAME = "opencl"
_INSTALL = "pip install 'kvkernels[opencl]'"
_DRIVER = (
    "Install the OpenCL driver (ICD) of your card; on Debian, pocl-opencl-icd for the CPU. It must "
    "have a file in /etc/OpenCL/vendors, or be named by OCL_ICD_VENDORS"
)
_DEVICE_NOT_FOUND, _PLATFORM_NOT_FOUND = -1, -1001
_TYPES = {"cpu": 2, "gpu": 4, "accelerator": 8, "custom": 16}  # cl_device_type
_EXTENSIONS = {
    "fp64": "cl_khr_fp64",
    "fp16": "cl_khr_fp16",
    "int64_atomics": "cl_khr_int64_base_atomics",
}


def _import_pyopencl() -> Any:
    return importlib.import_module("pyopencl")


def probe_opencl(load: Callable[[], Any] = _import_pyopencl) -> BackendStatus:
    """A status with every device of every platform, or with the cause and its fix. Never raises.

    ``load`` returns the module ``pyopencl``.
    """
    return probed(NAME, lambda: _probe(load))


def list_devices(cl: Any) -> Iterator[tuple[Any, Any]]:
    """(platform, device) in the order of ``opencl:<index>``. A platform that fails to list its
    devices has none: the others still count.
    """
    for platform in cl.get_platforms():
        try:
            found = platform.get_devices()
        except cl.Error:
            continue
        for device in found:
            yield platform, device


def _probe(load: Callable[[], Any]) -> BackendStatus:
    try:
        cl = load()
    except ModuleNotFoundError as error:
        if error.name == "pyopencl":
            raise Stop("pyopencl is not installed", _INSTALL) from None
        raise Stop(f"pyopencl cannot be imported: {text_of(error)}", _INSTALL) from None
    except Exception as error:
        raise Stop(f"pyopencl cannot be imported: {text_of(error)}", _INSTALL) from None
    try:
        found = list(list_devices(cl))
    except cl.Error as error:
        if _code(error) == _PLATFORM_NOT_FOUND:
            raise Stop("there is no OpenCL platform (PLATFORM_NOT_FOUND_KHR)", _DRIVER) from None
        raise Stop(f"listing platforms failed: {text_of(error)}", "Look at `clinfo`") from None
    if not found:
        raise Stop(_empty(cl), "Look at `clinfo`: a driver is there, but it sees no device")
    return BackendStatus(
        NAME, devices=tuple(_device(i, platform, d) for i, (platform, d) in enumerate(found))
    )


def _code(error: Any) -> int | None:
    code = getattr(error, "code", None)
    return code if isinstance(code, int) else None


def _empty(cl: Any) -> str:
    said = []
    for platform in cl.get_platforms():
        try:
            platform.get_devices()
            said.append(f"{platform.name}: no device")
        except cl.Error as error:
            none = _code(error) == _DEVICE_NOT_FOUND
            said.append(f"{platform.name}: {'no device' if none else text_of(error)}")
    return f"no platform lists a device ({'; '.join(said) or 'there is no platform'})"


def _ask(device: Any, name: str) -> Any:
    """What a device says about itself, None where it does not know the question."""
    try:
        return getattr(device, name)
    except Exception:
        return None


def _whole(device: Any, name: str) -> int | None:
    value = _ask(device, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _version(text: object) -> int | None:
    """``OpenCL C 1.2 PoCL`` as 1020; None when there is no version in it."""
    match = re.match(r"OpenCL (?:C )?(\d+)\.(\d+)", str(text))
    return int(match[1]) * 1000 + int(match[2]) * 10 if match else None


def _type(bits: int | None) -> str | None:
    return next((name for name, bit in _TYPES.items() if bits is not None and bits & bit), None)


def _lanes(device: Any, extensions: frozenset[str]) -> int | None:
    """Lanes that run together, where a vendor's extension says so."""
    if "cl_nv_device_attribute_query" in extensions:
        return _whole(device, "warp_size_nv")
    if "cl_amd_device_attribute_query" in extensions:
        return _whole(device, "wavefront_width_amd")
    return None


def _device(index: int, platform: Any, device: Any) -> DeviceCaps:
    extensions = frozenset(str(_ask(device, "extensions") or "").split())
    compiles = bool(_ask(device, "compiler_available"))
    facts: dict[str, Fact] = {
        "type": _type(_whole(device, "type")),
        "platform": str(_ask(platform, "name") or ""),
        "version": _version(_ask(device, "version")),
        "compiler": _version(_ask(device, "opencl_c_version")) if compiles else None,
        "address_bits": _whole(device, "address_bits"),
        "lanes": _lanes(device, extensions),
        "n_sm": _whole(device, "max_compute_units"),
        "max_threads": _whole(device, "max_work_group_size"),
        "local_memory": _whole(device, "local_mem_size"),
        "max_alloc": _whole(device, "max_mem_alloc_size"),
        "memory": _whole(device, "global_mem_size"),
    }
    # OpenCL has no step that enables a feature: what a device has can be used.
    features = {
        ours: Feature(theirs in extensions, theirs in extensions)
        for ours, theirs in _EXTENSIONS.items()
    }
    # PoCL goes on for a line about how it was built.
    version = str(_ask(platform, "version") or "").partition("  ")[0]
    driver = f"{version} {_ask(device, 'driver_version') or ''}".strip()
    return DeviceCaps(
        id=f"{NAME}:{index}",
        backend=NAME,
        name=str(_ask(device, "name") or "unnamed").strip(),
        driver=driver,
        facts=facts,
        features=features,
    )
