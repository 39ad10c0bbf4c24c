"""CUDA graphs for packs of changing size: configuration, capture and replay, and packs of fixed capacity.

Importing the package needs no GPU; without one, captured functions run eagerly.
"""

from thdattn.graphs.capture import Captured, Graphs, Pair
from thdattn.graphs.config import (
    CudaGraphConfig,
    CudaGraphModule,
    CudaGraphScope,
    InferenceCudaGraphScope,
    add_arguments,
    from_arguments,
    normalize,
)
from thdattn.graphs.static_pack import StaticPack, Upload

__all__ = [
    "Captured", "CudaGraphConfig", "CudaGraphModule", "CudaGraphScope", "Graphs", "InferenceCudaGraphScope", "Pair",
    "StaticPack", "Upload", "add_arguments", "from_arguments", "normalize",
]
