"""Attention over packed variable-length sequences spread over many GPUs, forward and backward, without a framework.

Ranks are in `thdattn.comm`, CUDA graphs in `thdattn.graphs`, and tensors with autograd in `thdattn.torch`, which is
imported by its name as it needs PyTorch.
"""

from thdattn import comm, graphs
from thdattn.attention import CPAttention
from thdattn.kv_cache import KVCache
from thdattn.mamba.cache import Mamba2Cache
from thdattn.mamba.mixer import Mamba2Mixer
from thdattn.mamba.saved import Mamba2Saved
from thdattn.mamba.shape import Mamba2Weights
from thdattn.packing import PackedBatch
from thdattn.plan.flops import Flops
from thdattn.plan.plan import Plan
from thdattn.saved import Saved
from thdattn.sharding import Sharding
from thdattn.varlen import VarlenSaved, varlen_attention, varlen_attention_backward

__version__ = "0.1.0"

__all__ = [
    "CPAttention", "Flops", "KVCache", "Mamba2Cache", "Mamba2Mixer", "Mamba2Saved", "Mamba2Weights", "PackedBatch",
    "Plan", "Saved", "Sharding", "VarlenSaved", "__version__", "comm", "graphs", "varlen_attention",
    "varlen_attention_backward",
]  # fmt: skip
