"""Attention over packed variable-length sequences spread over many GPUs, forward and backward, without a framework.

Ranks are in `thdattn.comm`, CUDA graphs in `thdattn.graphs`, and tensors with autograd in `thdattn.torch`, which is
imported by its name as it needs PyTorch.
"""

from thdattn import comm, graphs
from thdattn.attention import CPAttention
from thdattn.cache import KVCache
from thdattn.flops import Flops
from thdattn.mamba import Mamba2Mixer
from thdattn.mamba_cache import Mamba2Cache
from thdattn.mamba_saved import Mamba2Saved
from thdattn.mixer_shape import Mamba2Weights
from thdattn.packing import PackedBatch
from thdattn.plan import Plan
from thdattn.saved import Saved
from thdattn.sharding import Sharding
from thdattn.varlen import VarlenSaved, varlen_attention, varlen_attention_backward

__version__ = "0.1.0"

__all__ = [
    "CPAttention", "Flops", "KVCache", "Mamba2Cache", "Mamba2Mixer", "Mamba2Saved", "Mamba2Weights", "PackedBatch",
    "Plan", "Saved", "Sharding", "VarlenSaved", "__version__", "comm", "graphs", "varlen_attention",
    "varlen_attention_backward",
]  # fmt: skip
