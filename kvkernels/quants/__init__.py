"""The standard cache types as plain NumPy: what a body or a tail of f32 .. q4_0 is, byte for byte.

The bytes are GGML's. These functions are the definition that kernels are tested against, not a fast
path.
"""

from kvkernels.quants.blocks import BLOCK_TYPES as BLOCK_TYPES
from kvkernels.quants.blocks import BlockType as BlockType
from kvkernels.quants.blocks import Parts as Parts
from kvkernels.quants.blocks import affine as affine
from kvkernels.quants.blocks import block_type as block_type
from kvkernels.quants.blocks import join as join
from kvkernels.quants.blocks import split as split
from kvkernels.quants.codec import decode as decode
from kvkernels.quants.codec import encode as encode
from kvkernels.quants.tiles import TileLayout as TileLayout
