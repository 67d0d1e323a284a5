"""Which AMD cards the HIP runtime sees, as plain facts; and if none, why not.

Versions are integers: 6020 is HIP 6.2. The numbers of device attributes are those of HIP 5 to 7.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from typing import Any

from kvkernels.backend import BackendStatus
from kvkernels.capabilities import DeviceCaps, Fact, Feature
from kvkernels.hip.families import gfx_number, lookup
from kvkernels.hip.library import Libraries, call, error_text, has
from kvkernels.simt.probing import Stop, dotted, probed

NAME = "hip"
_ROCM = "Install ROCm (5, 6 or 7) with its HIP runtime; kvkernels needs no Python package of it"
_NO_DEVICE = 100
# hipDeviceAttribute_t
_MULTIPROCESSORS, _MAX_THREADS, _LOCAL_MEMORY, _WARP_SIZE = 63, 56, 74, 87
# The largest known layout of hipDeviceProp_t has 1472 bytes; `name` is its first 256 in all.
_PROPERTIES_BYTES, _NAME_BYTES = 16384, 256
_ARCH = re.compile(rb"(?<![\x20-\x7e])gfx[0-9a-f]{3,5}(?::[a-z0-9]+[+-])*(?=\0)")
#: variables by which users make a card pass for another one: shown, since results depend on them
OVERRIDES = ("HSA_OVERRIDE_GFX_VERSION",)


def probe_hip(
    libraries: Libraries | None = None, environ: Mapping[str, str] | None = None
) -> BackendStatus:
    """A status with every card, or with the cause and its fix. Never raises."""
    variables = os.environ if environ is None else environ
    return probed(NAME, lambda: _probe(libraries or Libraries(), variables))


def _probe(libraries: Libraries, environ: Mapping[str, str]) -> BackendStatus:
    try:
        hip, name = libraries.open_runtime()
    except OSError as error:
        text = str(error)
        if "cannot open shared object" in text:
            raise Stop("no HIP runtime library (libamdhip64.so) was found", _ROCM) from None
        raise Stop(f"the HIP runtime cannot be loaded: {text}", _ROCM) from None
    count = ctypes.c_int(0)
    code = call(hip, "hipGetDeviceCount", ctypes.byref(count))
    if code == _NO_DEVICE or (code == 0 and count.value == 0):
        hint = "Check `rocminfo`, that your user may open /dev/kfd (groups render and video), and "
        hint += "that HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES does not hide the card"
        raise Stop("the HIP runtime sees no card", hint)
    if code:
        raise Stop(f"counting cards failed: {error_text(hip, code)}", "Look at `rocminfo`")
    if libraries.open_compiler(hip, name) is None:
        raise Stop("the HIP runtime is there, but not its compiler (libhiprtc.so)", _ROCM)
    runtime = _version(hip, "hipRuntimeGetVersion")
    versions: dict[str, Fact] = {
        "runtime": runtime,
        "driver": _version(hip, "hipDriverGetVersion"),
        "hiprtc": runtime,  # hiprtcVersion says 9.0 in every release
    }
    versions |= {name.lower(): environ[name] for name in OVERRIDES if environ.get(name)}
    return BackendStatus(NAME, devices=tuple(_device(hip, i, versions) for i in range(count.value)))


def _version(hip: Any, function: str) -> int | None:
    """60342134 (HIP 6.3.42134) as 6030; None when the runtime does not say."""
    raw = ctypes.c_int(0)
    if call(hip, function, ctypes.byref(raw)) or raw.value <= 0:
        return None
    return raw.value // 10_000_000 * 1000 + raw.value // 100_000 % 100 * 10


def _attribute(hip: Any, number: int, index: int) -> int | None:
    value = ctypes.c_int(0)
    failed = call(hip, "hipDeviceGetAttribute", ctypes.byref(value), number, index)
    return None if failed else value.value


def device_arch(hip: Any, index: int) -> str | None:
    """The card's architecture with its flags, such as ``gfx90a:sramecc+:xnack-``; None if unclear.

    HIP gives it only inside ``hipDeviceProp_t``, whose layout changed with HIP 6 (which exports the
    new one as hipGetDevicePropertiesR0600 and keeps the old name for the old layout). The text is
    therefore looked for, in a buffer larger than either: the one whole text of this form after the
    leading name. Two different ones mean that we do not understand the layout: None.
    """
    buffer = ctypes.create_string_buffer(_PROPERTIES_BYTES)
    newest = has(hip, "hipGetDevicePropertiesR0600")
    name = "hipGetDevicePropertiesR0600" if newest else "hipGetDeviceProperties"
    if call(hip, name, buffer, index):
        return None
    found = {match[0].decode("ascii") for match in _ARCH.finditer(buffer.raw[_NAME_BYTES:])}
    return found.pop() if len(found) == 1 else None


def _name(hip: Any, index: int) -> str:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    if call(hip, "hipDeviceGetName", buffer, _NAME_BYTES, index):
        return ""
    return buffer.value.decode("utf-8", "replace")


def _memory(hip: Any, index: int) -> int | None:
    value = ctypes.c_size_t(0)
    failed = call(hip, "hipDeviceTotalMem", ctypes.byref(value), index)
    return None if failed else value.value


def _device(hip: Any, index: int, versions: Mapping[str, Fact]) -> DeviceCaps:
    arch = device_arch(hip, index)
    known = lookup(arch)
    lanes = _attribute(hip, _WARP_SIZE, index)
    if known is not None and lanes != known.lanes:
        # The table and the driver disagree, so neither is believed.
        lanes = None
    facts: dict[str, Fact] = {
        "arch": arch,
        "gfx": gfx_number(arch) if arch else None,
        "family": known.family if known else None,
        "lanes": lanes,
        "n_sm": _attribute(hip, _MULTIPROCESSORS, index),
        "max_threads": _attribute(hip, _MAX_THREADS, index),
        "local_memory": _attribute(hip, _LOCAL_MEMORY, index),
        "memory": _memory(hip, index),
        **versions,
    }
    runtime = versions["runtime"]
    driver = f"HIP {dotted(runtime)}" if isinstance(runtime, int) else "HIP"
    return DeviceCaps(
        id=f"{NAME}:{index}",
        backend=NAME,
        name=_name(hip, index) or arch or "unnamed",
        driver=driver,
        facts=facts,
        # All listed families have it; of another card it is not known.
        features={"fp64": Feature(True, True) if known else Feature()},
    )
