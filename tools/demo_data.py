"""Make ``kvkernels/data/demo_kv.npz`` from full captures: ``demo_data.py PROSE.npz CODE.npz``.

fp16 values are stored as two byte planes (low bytes, high bytes): the high bytes, which hold the
exponents, compress well on their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

TARGET = Path(__file__).resolve().parent.parent / "kvkernels" / "data" / "demo_kv.npz"
# name in the demo -> (index of the layer inside the capture, tokens)
TAKEN = {"prose": (2, 960), "code": (1, 512)}


def main(prose: str, code: str) -> None:
    """Write the file."""
    arrays: dict[str, np.ndarray] = {}
    for name, path in (("prose", prose), ("code", code)):
        index, tokens = TAKEN[name]
        with np.load(path, allow_pickle=False) as capture:
            for key in "KVQ":
                rows = np.ascontiguousarray(capture[key][index, :, :tokens])
                planes = rows.view(np.uint8).reshape(-1, 2).T
                arrays[f"{name}_{key}"] = np.ascontiguousarray(planes)
                arrays[f"{name}_{key}_shape"] = np.array(rows.shape)
            arrays[f"{name}_layer"] = capture["layers"][index]
            arrays[f"{name}_meta"] = np.array(f"{capture['meta']} First {tokens} tokens kept here.")
    np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:3])
