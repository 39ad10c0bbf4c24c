"""Attention over packed sequences with context parallelism, forward and backward, without a framework.

| start here | for |
|---|---|
| `PackedBatch` | lengths of the sequences in one buffer of rows |
| `CPAttention`, `CPAttention.plan` | attention over one rank or several; a plan per batch |
| `CPAttention.forward`, `CPAttention.backward` | the calls of a layer |
| `thdattn.comm.init`, `thdattn.comm.run_local` | ranks that mpiexec started, and simulated ranks |

| then | for |
|---|---|
| `Plan`, `Sharding` | a rank's rows, positions, labels; which rank owns which row |
| `Saved`, `GatheredKV`, `Memory`, `Flops` | results of a forward, of a gather; bytes and operations of a layer |
| `varlen_attention` | the call of flash-attn, on one rank |
| `thdattn.torch` | PyTorch with autograd; `import thdattn.torch` |
| `thdattn.graphs` | CUDA graphs of layers and steps |
| `thdattn.timeline.record` | what all ranks compute and exchange in a step, as rows and as a picture |
| `KVCache`, `CPAttention.decode` | decoding |
| `Mamba2Mixer`, `Mamba2Weights`, `Mamba2Cache` | Mamba-2 layers |
| `thdattn.comm.Levels`, `thdattn.comm.from_torch` | two levels of ranks; ranks of torch.distributed |
| `thdattn.costs.predicted` | predicted times of a method; `import thdattn.costs` |
| `thdattn.oracle` | attention in float64, and the accuracy rule; `import thdattn.oracle` |
"""

from thdattn import comm, graphs, timeline
from thdattn.attention import CPAttention, Saved
from thdattn.kv_cache import KVCache
from thdattn.mamba.cache import Mamba2Cache, Mamba2Saved
from thdattn.mamba.mixer import Mamba2Mixer
from thdattn.mamba.shape import Mamba2Weights
from thdattn.methods.all_gather import GatheredKV
from thdattn.packing import PackedBatch
from thdattn.plan.memory import Flops, Memory
from thdattn.plan.plan import Plan
from thdattn.sharding import Sharding
from thdattn.varlen import VarlenSaved, varlen_attention, varlen_attention_backward

__version__ = "0.1.0"

__all__ = [
    "CPAttention",
    "Flops",
    "GatheredKV",
    "KVCache",
    "Mamba2Cache",
    "Mamba2Mixer",
    "Mamba2Saved",
    "Mamba2Weights",
    "Memory",
    "PackedBatch",
    "Plan",
    "Saved",
    "Sharding",
    "VarlenSaved",
    "__version__",
    "comm",
    "graphs",
    "timeline",
    "varlen_attention",
    "varlen_attention_backward",
]
