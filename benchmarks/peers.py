"""Peers: this package and other implementations of packed attention, on the same inputs and the same stream.

Peers differ in how they are called, never in how they are timed. A peer's package is imported when the peer is made.
"""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import cupy
import ml_dtypes
import numpy as np
from accuracy import RESULTS
from numpy.typing import DTypeLike, NDArray
from workloads import Case, TreeCase

import thdattn
from thdattn.fuzz.runs import portable_kernels

# Two right results in bfloat16 differ by less: as a whole, and anywhere relative to the largest element.
RELATIVE_ERROR, LARGEST_ERROR = 1e-2, 2.0**-5
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DISTINCT_NUMBERS = 16_777_259  # a prime: arrays that repeat them never have two equal rows


class Inputs(NamedTuple):
    """CuPy arrays (rows, heads, width), bfloat16, standard normal."""

    q: Any
    k: Any
    v: Any
    dout: Any


def draw_inputs(case: Case, num_rows: int | None = None) -> Inputs:
    """Return the inputs of a case, or of `num_rows` rows and keys, the same in every run."""
    layout = Inputs(
        q=(case.heads, case.head_dim),
        k=(case.kv_heads, case.head_dim),
        v=(case.kv_heads, case.v_head_dim),
        dout=(case.heads, case.v_head_dim),
    )
    queries, keys = (case.total_tokens, case.total_keys) if num_rows is None else (num_rows, num_rows)
    rows = Inputs(queries, keys, keys, queries)
    return Inputs(*(normal((rows[i], *shape), i) for i, shape in enumerate(layout)))


def normal(shape: tuple[int, ...], seed: int, dtype: DTypeLike = ml_dtypes.bfloat16, xp: Any = cupy) -> Any:
    """Return standard normal numbers; drawing all of a large array on the host would take too long."""
    size = int(np.prod(shape))
    numbers = np.random.default_rng(seed).standard_normal(min(size, DISTINCT_NUMBERS), np.float32)
    return xp.tile(xp.asarray(numbers.astype(dtype)), -(-size // len(numbers)))[:size].reshape(shape)


def release_memory() -> None:
    """Give the free memory of CuPy's and torch's pools back to the GPU, because either would starve the other.

    NOTE: no captured graph may be alive: its work arrays can be in the free memory of CuPy's pool.
    """
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


class Peer(ABC):
    """Layer over one case; it keeps the results of the last calls, and backward follows the last forward.

    logits: softcap and sinks of the oracle, where the layer has them.
    """

    logits: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Return the version of the implementation; raise where it cannot be imported."""

    @abstractmethod
    def __init__(self, case: Any, inputs: Any) -> None: ...

    @abstractmethod
    def forward(self) -> None: ...

    @abstractmethod
    def backward(self) -> None: ...

    @abstractmethod
    def capture(self, call: Callable[[], None], calls: int) -> Callable[[], object]:
        """Capture a CUDA graph of so many calls of `forward` or `backward`; return the function that replays it."""

    @abstractmethod
    def results(self) -> Sequence[Any]:
        """Return out and, after a backward, gradients: of attention dq, dk, dv, (rows, heads, width)."""

    @abstractmethod
    def on_host(self) -> list[NDArray[Any]]:
        """Return the results as NumPy arrays."""


class CupyPeer(Peer):
    """Peer whose results are CuPy arrays."""

    def capture(self, call: Callable[[], None], calls: int) -> Callable[[], object]:
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        try:
            for _ in range(calls):
                call()
        finally:  # a stream left in capture would fail every later call
            graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def on_host(self) -> list[NDArray[Any]]:
        return [to_host(x) for x in self.results()]


def to_host(x: Any) -> NDArray[Any]:
    """Copy to the host; bfloat16 as int16, because CuPy does not copy strided arrays of every dtype."""
    if isinstance(x, np.ndarray):
        return x
    copy: NDArray[Any] = x.view(np.int16).get().view(x.dtype) if x.dtype == BFLOAT16 else x.get()
    return copy


class Ours(CupyPeer):
    """CPAttention on one rank.

    options: further options of CPAttention; sinks are 0.
    """

    options: ClassVar[dict[str, Any]] = {}
    sinks: Any = None
    grads: Sequence[Any] = ()

    @classmethod
    def version(cls) -> str:
        return thdattn.__version__

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.inputs = inputs
        self.attn = case.attention("cuda", **self.options)
        if self.attn.sinks:
            self.sinks = cupy.zeros(case.heads, np.float32)
        if self.attn.sinks or self.attn.softcap:
            self.logits = {"softcap": self.attn.softcap, "sinks": None if self.sinks is None else to_host(self.sinks)}
        self.batch, self.key_batch = case.batch(), case.key_batch()
        self.plan = self.made_plan()
        self.forward()  # a plan keeps the kernels of its first calls
        self.backward()

    def made_plan(self) -> thdattn.Plan:
        """Make the plan of all calls that are timed."""
        return self.attn.plan(self.batch, "contiguous", key_batch=self.key_batch)

    def forward(self) -> None:
        q, k, v, _ = self.inputs
        self.out, self.saved = self.attn.forward(q, k, v, self.plan, sinks=self.sinks)

    def varlen_attention(self) -> None:
        """Call the forward as varlen_attention, which finds its plan by the content of the lengths."""
        (q, k, v, _), attn, queries = self.inputs, self.attn, self.batch.cu_seqlens
        keys = queries if self.key_batch is None else self.key_batch.cu_seqlens
        thdattn.varlen_attention(q, k, v, queries, keys, causal=attn.causal, window_size=attn.window)

    def backward(self) -> None:
        self.grads = self.attn.backward(self.inputs.dout, self.saved)

    def results(self) -> Sequence[Any]:
        return self.out, *self.grads[:3]


def on_device(batch: thdattn.PackedBatch) -> thdattn.PackedBatch:
    """Return the batch with its lengths on the GPU."""
    return thdattn.PackedBatch(cupy.asarray(batch.cu_seqlens), total_rows=batch.total_rows)


def with_options(kind: type[Ours] = Ours, /, **options: Any) -> type[Ours]:
    """Make a peer of a kind with options of CPAttention."""
    return type(kind.__name__, (kind,), {"options": options})


class GpuLengths(Ours):
    """CPAttention with lengths that only the GPU knows, as where a CUDA graph plans anew at each replay."""

    def made_plan(self) -> thdattn.Plan:
        queries, keys = on_device(self.batch), None if self.key_batch is None else on_device(self.key_batch)
        return self.attn.plan(queries, "contiguous", key_batch=keys, finite_padding=True)


class Portable(Ours):
    """CPAttention with the portable kernels."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        with portable_kernels():
            super().__init__(case, inputs)


class TorchPeer(Peer):
    """Peer on torch tensors that share memory with the inputs; its backward is autograd's.

    names: of the first results, which are compared with ours.
    """

    names: tuple[str, ...]

    def __init__(self, leaves: Sequence[Any], dout: Any) -> None:
        import torch

        # Autograd runs a backward on the stream of its forward, which must be the one that is captured.
        self.stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
        torch.cuda.set_stream(self.stream)
        self.torch = torch
        self.leaves, self.dout = [x.detach().requires_grad_() for x in leaves], dout
        self.grads: Sequence[Any] = ()

    @abstractmethod
    def call(self, *leaves: Any) -> Any:
        """Call forward once and return out."""

    def forward(self) -> None:
        self.out = self.call(*self.leaves)

    def backward(self) -> None:
        self.grads = self.torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def capture(self, call: Callable[[], None], calls: int) -> Callable[[], object]:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream):
            for _ in range(calls):
                call()
        replay: Callable[[], object] = graph.replay
        return replay

    def results(self) -> Sequence[Any]:
        return [x.detach() for x in (self.out, *self.grads)]

    def on_host(self) -> list[NDArray[Any]]:
        return [x.float().cpu().numpy() for x in self.results()]

    def check(self, wanted: Sequence[Any]) -> None:
        """Raise ValueError where the results are not those of ours (CuPy arrays) within bfloat16."""
        check(self.results(), wanted, self.names)


class TorchAttention(TorchPeer):
    """Attention of torch tensors over one case."""

    names = RESULTS

    def __init__(self, case: Case, inputs: Inputs) -> None:
        import torch

        self.case = case
        self.longest, self.longest_keys = max(case.lengths), max(case.keys or case.lengths)
        super().__init__([self.laid_out(tensor(x)) for x in inputs[:3]], self.laid_out(tensor(inputs.dout)))
        batches = case.batch(), case.key_batch() or case.batch()
        self.cu_seqlens, self.cu_seqlens_k = (torch.from_dlpack(cupy.asarray(x.cu_seqlens)) for x in batches)

    def laid_out(self, x: Any) -> Any:
        """Return a packed tensor (rows, heads, width) as this peer takes it, without a copy."""
        return x

    def packed(self, x: Any) -> Any:
        """Invert laid_out."""
        return x

    def results(self) -> Sequence[Any]:
        return [self.packed(x) for x in super().results()]


class FlashAttention4(TorchAttention):
    """flash-attn-4: kernels in the CuTe DSL, compiled at the first call."""

    @classmethod
    def version(cls) -> str:
        import flash_attn.cute.interface  # noqa: F401 - fails early where a part is missing

        return importlib.metadata.version("flash-attn-4")

    def __init__(self, case: Case, inputs: Inputs) -> None:
        from flash_attn.cute.interface import flash_attn_varlen_func

        super().__init__(case, inputs)
        self.attention = flash_attn_varlen_func
        self.window = tuple(None if side < 0 else side for side in case.window)

    def call(self, q: Any, k: Any, v: Any) -> Any:
        out, _ = self.attention(
            q, k, v, cu_seqlens_q=self.cu_seqlens, cu_seqlens_k=self.cu_seqlens_k, max_seqlen_q=self.longest,
            max_seqlen_k=self.longest_keys, causal=self.case.causal, window_size=self.window,
        )
        return out


class TorchVarlen(TorchAttention):
    """torch.nn.attention.varlen: FlashAttention-2. Releases differ in the arguments for the mask."""

    @classmethod
    def version(cls) -> str:
        import torch
        import torch.nn.attention.varlen

        return str(torch.__version__)

    def __init__(self, case: Case, inputs: Inputs) -> None:
        from torch.nn.attention.varlen import varlen_attn

        if case.head_dim != case.v_head_dim:
            raise ValueError("takes one head_dim for q, k and v")
        known = inspect.signature(varlen_attn).parameters
        self.mask: dict[str, Any] = {}
        if "window_size" in known:
            self.mask["window_size"] = case.sides
        elif case.window == (-1, -1):
            self.mask["is_causal"] = case.causal
        else:
            raise ValueError("takes no window in this release")
        if case.heads != case.kv_heads and "enable_gqa" in known:
            self.mask["enable_gqa"] = True
        super().__init__(case, inputs)
        self.attention = varlen_attn

    def call(self, q: Any, k: Any, v: Any) -> Any:
        return self.attention(q, k, v, self.cu_seqlens, self.cu_seqlens_k, self.longest, self.longest_keys, **self.mask)


class TorchCudnn(TorchAttention):
    """scaled_dot_product_attention on cuDNN: a batch of equal lengths, (batch, heads, length, width)."""

    @classmethod
    def version(cls) -> str:
        import torch

        return f"{torch.__version__} cuDNN {torch.backends.cudnn.version()}"

    def __init__(self, case: Case, inputs: Inputs) -> None:
        import torch

        if len(set(case.lengths)) > 1 or case.keys is not None:
            raise ValueError("takes only sequences of one length")
        if case.window != (-1, -1):
            raise ValueError("takes no window")
        # For the whole process: a context around every call would take time.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
        super().__init__(case, inputs)
        self.attention = torch.nn.functional.scaled_dot_product_attention
        self.grouped = case.heads != case.kv_heads

    def laid_out(self, x: Any) -> Any:
        return x.view(len(self.case.lengths), self.case.lengths[0], *x.shape[1:]).transpose(1, 2)

    def packed(self, x: Any) -> Any:
        return x.transpose(1, 2).flatten(0, 1)

    def call(self, q: Any, k: Any, v: Any) -> Any:
        return self.attention(q, k, v, is_causal=self.case.causal, enable_gqa=self.grouped)


class TorchFlash(TorchCudnn):
    """scaled_dot_product_attention on FlashAttention-2, called past torch's choice of kernels, which is cuDNN here."""

    @classmethod
    def version(cls) -> str:
        import torch

        return str(torch.__version__)

    def call(self, q: Any, k: Any, v: Any) -> Any:
        return self.torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.case.causal)[0]


class DenseFlash4(FlashAttention4):
    """flash-attn-4 on a batch of equal lengths, (batch, length, heads, width)."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        from flash_attn.cute.interface import flash_attn_func

        super().__init__(case, inputs)
        self.attention = flash_attn_func

    def laid_out(self, x: Any) -> Any:
        return x.view(len(self.case.lengths), self.case.lengths[0], *x.shape[1:])

    def packed(self, x: Any) -> Any:
        return x.flatten(0, 1)

    def call(self, q: Any, k: Any, v: Any) -> Any:
        out, *_ = self.attention(q, k, v, causal=self.case.causal)
        return out


class Flex(TorchPeer):
    """FlexAttention over prefix trees, compiled for the rows of the case; its block mask is made once."""

    names = RESULTS

    @classmethod
    def version(cls) -> str:
        import torch
        import torch.nn.attention.flex_attention

        return str(torch.__version__)

    def __init__(self, case: TreeCase, inputs: Inputs) -> None:
        import torch
        import torch._dynamo
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        *views, dout = (tensor(x).transpose(0, 1)[None] for x in inputs)  # (1, heads, rows, width)
        super().__init__(views, dout)
        self.leaves = [x.detach().contiguous().requires_grad_() for x in views]  # copied on the peer's stream
        self.dout = dout.contiguous()
        begin, end = (torch.from_numpy(x.copy()).to(dout.device)
                      for x in (case.plan.key_ranges[:, 0], case.plan.query_ranges[:, 1]))

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (begin[query] <= key) & (key <= query) & (query < end[key])

        rows = case.total_tokens
        self.mask = create_block_mask(sees, None, None, rows, rows, device=dout.device)
        torch._dynamo.reset()  # of another case, or it would compile for any number of rows
        torch._functorch.config.donated_buffer = False  # several backward calls follow one forward call
        self.attention = torch.compile(flex_attention, dynamic=False)
        self.grouped = case.heads != case.kv_heads

    def call(self, q: Any, k: Any, v: Any) -> Any:
        return self.attention(q, k, v, block_mask=self.mask, enable_gqa=self.grouped)

    def results(self) -> Sequence[Any]:
        return [x[0].transpose(0, 1) for x in super().results()]


def check(results: Sequence[Any], wanted: Sequence[Any], names: Sequence[str] = RESULTS) -> None:
    """Raise ValueError where results of a peer (tensors) are not those of ours (CuPy arrays) within bfloat16."""
    for name, found, ours in zip(names, results, map(tensor, wanted), strict=False):
        reference = ours.float()
        error = found.float() - reference
        relative = float(error.norm() / reference.norm())
        largest = float(error.abs().max() / reference.abs().max())
        if not (relative <= RELATIVE_ERROR and largest <= LARGEST_ERROR):  # NaN fails too
            raise ValueError(
                f"{name} differs from ours by {relative:.1e} as a whole (at most {RELATIVE_ERROR:.1e}) and by "
                f"{largest:.1e} of the largest element (at most {LARGEST_ERROR:.1e}): not timed"
            )


def tensor(x: Any) -> Any:
    """Return a CuPy array as a torch tensor of the same memory; bfloat16 as int16, which every CuPy exports."""
    import torch

    return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_dlpack(x)


PEERS: dict[str, type[Peer]] = {
    "ours": Ours, "deterministic": with_options(deterministic=True), "gpu_lengths": GpuLengths, "portable": Portable,
    "portable-deterministic": with_options(Portable, deterministic=True), "fa4": FlashAttention4, "varlen": TorchVarlen,
    "cudnn": TorchCudnn,
}
DENSE: dict[str, type[Peer]] = {"ours": Ours, "cudnn": TorchCudnn, "flash": TorchFlash, "fa4": DenseFlash4}
LOGITS: dict[str, type[Peer]] = {
    "ours": Ours, "sinks": with_options(sinks=True), "softcap": with_options(softcap=50.0),
    "both": with_options(softcap=50.0, sinks=True), "low": with_options(softcap=5.0),
    "portable": Portable, "portable-sinks": with_options(Portable, sinks=True),
    "portable-softcap": with_options(Portable, softcap=50.0),
}  # "low" is among these logits, so that a longer polynomial takes the place of the shortest one
