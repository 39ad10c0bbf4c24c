"""Attention over packed variable-length sequences spread over many GPUs, forward and backward, without a framework."""

from thdattn import comm, graphs
from thdattn.attention import CPAttention, Flops, Saved
from thdattn.cache import KVCache
from thdattn.packing import PackedBatch
from thdattn.plan import Plan
from thdattn.sharding import Sharding
from thdattn.varlen import varlen_attention, varlen_attention_backward

__version__ = "0.1.0"

__all__ = [
    "CPAttention", "Flops", "KVCache", "PackedBatch", "Plan", "Saved", "Sharding", "__version__", "comm", "graphs",
    "varlen_attention", "varlen_attention_backward",
]  # fmt: skip
