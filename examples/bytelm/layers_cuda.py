"""Layers on a GPU: the functions of layers.py with the same arguments, on CuPy arrays in bfloat16.

cuBLAS computes matrix products with float32 sums, and accumulates gradients of weights in float32, in place. The other
kernels are in layers.cu and decode.cu. Sums have one order, so the same inputs give the same bits. No function waits
for the GPU; all run on CuPy's current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from layers import EPSILON, AdamWStep
from numpy.typing import DTypeLike

from thdattn.jit.compiler import Arguments, launch_early

xp = cupy
DTYPE = np.dtype(ml_dtypes.bfloat16)
SOURCES = tuple(map(Path(__file__).with_name, ("layers.cu", "decode.cu")))
OPTIONS = ("-std=c++17", "-default-device")
STEP = np.dtype([(name, np.float32) for name in AdamWStep._fields])
BLOCK = 256  # threads per block of elementwise kernels
STRIDING_BLOCKS = 1024  # enough to fill a GPU
WARP_BYTES = {1: 4928, 2: 7488}  # shared memory of a Part of decode.cu, by number of weights
WORKSPACE = 2**25  # bytes, cuBLAS's default on Hopper

# Constants of cublas_api.h and library_types.h.
COMPUTE_32F, GEMM_DEFAULT = 68, -1
TYPES = {DTYPE: 14, np.dtype(np.float32): 0}

Array = Any
_SCALES = np.array([0, 1], np.float32)  # cuBLAS reads alpha and beta here
_ZERO, _ONE = _SCALES.ctypes.data, _SCALES.ctypes.data + _SCALES.itemsize


def linear_forward(x: Array, weight: Array, dtype: DTypeLike | None = None) -> Array:
    """Compute layers.linear_forward."""
    y = cupy.empty((len(x), len(weight)), dtype or x.dtype)
    _product(y, x, weight, transpose_b=True)
    return y


def linear_backward(dy: Array, x: Array, weight: Array, dweight: Array) -> Array:
    """Compute layers.linear_backward."""
    linear_backward_weight(dy, x, dweight)
    return linear_backward_input(dy, weight)


def linear_backward_input(dy: Array, weight: Array) -> Array:
    """Compute layers.linear_backward_input."""
    dx = cupy.empty((len(dy), weight.shape[1]), weight.dtype)
    _product(dx, dy, weight)
    return dx


def linear_backward_weight(dy: Array, x: Array, dweight: Array) -> None:
    """Compute layers.linear_backward_weight."""
    _product(dweight, dy, x, transpose_a=True, add=True)


def _product(
    out: Array, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False, add: bool = False
) -> None:
    """Compute out = a b, or out += a b: bfloat16 matrices, out in bfloat16 or float32, sums in float32.

    cuBLAS is column-major, so it computes out^T = b^T a^T.
    """
    if not (out.size and a.size):
        return  # a rank without rows
    _blas().call(
        "cublasGemmEx", int(transpose_b), int(transpose_a),
        out.shape[1], out.shape[0], a.shape[0 if transpose_a else 1],
        _ONE, b.data.ptr, TYPES[b.dtype], b.shape[1], a.data.ptr, TYPES[a.dtype], a.shape[1],
        _ONE if add else _ZERO, out.data.ptr, TYPES[out.dtype], out.shape[1], COMPUTE_32F, GEMM_DEFAULT,
    )


@functools.cache
def load() -> Any:
    """Load cuBLAS; see layers.load.

    Raises:
        RuntimeError: it is missing.
    """
    cuda = cupy.cuda.nvrtc.getVersion()[0]
    try:
        cupy.cuda.cublas  # noqa: B018 - CuPy finds the library and loads it by this access
    except ImportError as error:
        found = str(error).splitlines()[0]  # the other lines list folders
        raise RuntimeError(f"cuBLAS is missing, wanted for matrix products ({found}); install it with: "
                           f'pip install -e ".[cublas{cuda}]"') from error
    library = ctypes.CDLL(f"libcublas.so.{cuda}")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cublasSetWorkspace_v2.argtypes = pointer, pointer, ctypes.c_size_t
    library.cublasSetStream_v2.argtypes = pointer, pointer
    library.cublasGemmEx.argtypes = (
        pointer, *5 * (number,), pointer, *2 * (pointer, number, number), pointer, pointer, *4 * (number,))
    return library


class _Blas:
    """Handle of cuBLAS on CuPy's current stream. CuPy's own functions refuse to be captured in a CUDA graph.

    The workspace is always the same, as cuBLAS chooses its algorithm by the workspace: a graph would get another one.
    """

    def __init__(self) -> None:
        self._library, self._handle, self._stream = load(), ctypes.c_void_p(), -1
        self._workspace = cupy.empty(WORKSPACE, np.uint8)
        self._check("cublasCreate_v2", self._library.cublasCreate_v2(ctypes.byref(self._handle)))

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library with the handle."""
        stream = cupy.cuda.get_current_stream().ptr
        if stream != self._stream:  # cublasSetStream resets the workspace
            self._check("cublasSetStream", self._library.cublasSetStream_v2(self._handle, stream))
            workspace = self._workspace.data.ptr, WORKSPACE
            self._check("cublasSetWorkspace", self._library.cublasSetWorkspace_v2(self._handle, *workspace))
            self._stream = stream
        self._check(name, getattr(self._library, name)(self._handle, *args))

    @staticmethod
    def _check(name: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{name} returned status {status}, wanted 0; see cublasStatus_t in cuBLAS's manual")


_handles = threading.local()  # one per thread, as simulated ranks are threads and set the handle's stream


def _blas() -> _Blas:
    """Return this thread's handle for the current GPU."""
    device = cupy.cuda.runtime.getDevice()
    if getattr(_handles, "device", None) != device:
        _handles.blas, _handles.device = _Blas(), device
    blas: _Blas = _handles.blas
    return blas


def residual_norm_forward(x: Array, branch: Array | None, weight: Array) -> tuple[Array, Array]:
    """Compute layers.residual_norm_forward. The sum is rounded to bfloat16 once, which halves the memory of the stream.
    """
    (rows, width), y = x.shape, cupy.empty_like(x)
    total = x if branch is None else cupy.empty_like(x)
    _launch("residual_norm_forward", rows, _row_block(width), total, y, x, branch, weight, width, EPSILON)
    return total, y


def residual_norm_backward(dy: Array, dsum: Array | None, x: Array, weight: Array, dweight: Array) -> Array:
    """Compute layers.residual_norm_backward."""
    (rows, width), dx = x.shape, cupy.empty_like(x)
    partial = cupy.empty((min(rows, STRIDING_BLOCKS), width), np.float32)
    _launch("residual_norm_backward", len(partial), _row_block(width), dx, partial, dy, dsum, x, weight, rows, width,
            EPSILON)
    dweight += partial.sum(axis=0)
    return dx


def _row_block(width: int) -> int:
    return -(-width // (8 * 32)) * 32


def rope_forward(qkv: Array, rotation: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """Compute layers.rope_forward."""
    head_dim = 2 * rotation.shape[2]
    q, k, v = (cupy.empty((len(qkv), n, head_dim), qkv.dtype) for n in (heads, kv_heads, kv_heads))
    _rope(q, k, v, qkv, rotation, backward=False)
    return q, k, v


def rope_backward(dq: Array, dk: Array, dv: Array, rotation: Array) -> Array:
    """Compute layers.rope_backward."""
    rows, heads, head_dim = dq.shape
    dqkv = cupy.empty((rows, (heads + 2 * dk.shape[1]) * head_dim), dq.dtype)
    _rope(dq, dk, dv, dqkv, rotation, backward=True)
    return dqkv


def _rope(q: Array, k: Array, v: Array, qkv: Array, rotation: Array, backward: bool) -> None:
    (rows, heads, head_dim), pitch = q.shape, qkv.strides[0] // qkv.itemsize
    _launch("rope", -(-qkv.size // (16 * BLOCK)), BLOCK, q, k, v, qkv, rotation, rows, heads, k.shape[1], head_dim,
            pitch, backward)


def swiglu_forward(gate_up: Array) -> Array:
    """Compute layers.swiglu_forward."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    y = cupy.empty((rows, hidden), gate_up.dtype)
    _launch("swiglu_forward", -(-y.size // (8 * BLOCK)), BLOCK, y, gate_up, rows, hidden)
    return y


def swiglu_backward(dy: Array, gate_up: Array) -> Array:
    """Compute layers.swiglu_backward."""
    dgate_up = cupy.empty_like(gate_up)
    _launch("swiglu_backward", -(-dy.size // (8 * BLOCK)), BLOCK, dgate_up, dy, gate_up, *dy.shape)
    return dgate_up


def embedding_forward(tokens: Array, table: Array) -> Array:
    """Compute layers.embedding_forward."""
    return table.view(np.uint16).take(tokens, axis=0).view(table.dtype)


def embedding_backward(dx: Array, tokens: Array, dtable: Array) -> None:
    """Compute layers.embedding_backward."""
    chosen = cupy.empty((len(tokens), len(dtable)), dx.dtype)
    _launch("one_hot", -(-chosen.size // BLOCK), BLOCK, chosen, tokens, *chosen.shape)
    _product(dtable, chosen, dx, transpose_a=True, add=True)


def cross_entropy(logits: Array, targets: Array, vocabulary: int, num_targets: Array) -> tuple[Array, Array]:
    """Compute layers.cross_entropy; dlogits is bfloat16."""
    rows, columns = logits.shape
    nats, dlogits = cupy.empty(rows, np.float32), cupy.empty((rows, columns), DTYPE)
    _launch("cross_entropy", -(-rows * 32 // BLOCK), BLOCK, nats, dlogits, logits, targets, rows, columns, vocabulary,
            num_targets)
    return nats.sum() / num_targets, dlogits


def l2_norm(x: Array) -> Array:
    """Compute layers.l2_norm."""
    partial = cupy.empty(STRIDING_BLOCKS, np.float32)
    _launch("sum_of_squares", STRIDING_BLOCKS, BLOCK, partial, x, np.uint64(x.size))
    return cupy.sqrt(partial.sum())


def adamw_update(
    weights: Array, copy: Array, gradient: Array, mean: Array, square: Array, norm: Array, step: AdamWStep
) -> None:
    """Compute layers.adamw_update."""
    _launch("adamw_update", -(-weights.size // BLOCK), BLOCK, weights, copy, gradient, mean, square, norm,
            np.uint64(weights.size), np.array(step, STEP)[()])


# ------------------------------------------------------------------------------------------------ decode


def decode_qkv(
    x: Array, gain: Array, weight: Array, rotation: Array, positions: Array, heads: int, kv_heads: int
) -> tuple[Array, Array, Array]:
    """Compute layers.decode_qkv. As all decode kernels, it loads weights while the kernel before may still run."""
    (rows, width), (_, capacity, half) = x.shape, rotation.shape
    q, k, v = (cupy.empty((rows, n, 2 * half), x.dtype) for n in (heads, kv_heads, kv_heads))
    _product_early("decode_qkv", weight, q, k, v, x, gain, weight, rotation, positions, rows, width, heads, kv_heads,
                   half, capacity, EPSILON)
    return q, k, v


def decode_product(x: Array, gain: Array, weight: Array) -> Array:
    """Compute layers.decode_product."""
    y = cupy.empty((len(x), len(weight)), x.dtype)
    _product_early("decode_product", weight, y, x, gain, weight, *x.shape, len(weight), EPSILON)
    return y


def decode_linear(x: Array, weight: Array, residual: Array, gain: Array | None = None) -> Array:
    """Compute layers.decode_linear."""
    y = cupy.empty_like(residual)
    _product_early("decode_linear", weight, y, x, gain, weight, residual, *x.shape, len(weight), EPSILON)
    return y


def decode_swiglu(x: Array, gain: Array, weight: Array) -> Array:
    """Compute layers.decode_swiglu."""
    hidden = len(weight) // 2
    y = cupy.empty((len(x), hidden), x.dtype)
    _product_early("decode_swiglu", weight[:hidden], y, x, gain, weight, *x.shape, hidden, EPSILON, weights=2)
    return y


def decode_logits(x: Array, gain: Array, weight: Array) -> Array:
    """Compute layers.decode_logits."""
    y = cupy.empty((len(x), len(weight)), np.float32)
    _product_early("decode_logits", weight, y, x, gain, weight, *x.shape, len(weight), EPSILON)
    return y


def draw(
    tokens: Array, written: Array, counts: Array, logits: Array, uniforms: Array, vocabulary: int, end: int,
    top_k: int, temperature: float,
) -> None:
    """Compute layers.draw; vocabulary <= 1024."""
    _launch_early("draw", len(tokens), -(-vocabulary // 32), 0, tokens, written, counts, logits, uniforms,
                  logits.shape[1], vocabulary, end, written.shape[1], top_k, float(temperature))


def _product_early(name: str, weight: Array, *args: Any, weights: int = 1) -> None:
    """Launch products of a few rows with `weights` weights of that shape: 8 of their rows a block, 128 columns a warp.
    """
    warps = min(max(4, -(-weight.shape[1] // 128)), _most_warps(name, WARP_BYTES[weights]))
    _launch_early(name, -(-len(weight) // 8), warps, warps * WARP_BYTES[weights], *args)


def _launch_early(name: str, grid: int, warps: int, shared_bytes: int, *args: Any) -> None:
    """Launch a kernel that itself waits for the one before; see launch_early."""
    launch_early(_kernel(name).kernel.ptr, (grid,), 32 * warps, shared_bytes, Arguments(map(_argument, args)))


@functools.cache
def _most_warps(name: str, warp_bytes: int) -> int:
    """Return the most warps of a block of a kernel, and allow the kernel the shared memory that they need."""
    kernel = _kernel(name)
    limit = int(cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
    warps = min(int(kernel.max_threads_per_block) // 32, limit // warp_bytes)
    kernel.max_dynamic_shared_size_bytes = warps * warp_bytes
    return warps


def _launch(name: str, grid: int, block: int, *args: Any) -> None:
    """Launch a kernel on the current stream, unless the grid is empty."""
    if grid:
        _kernel(name)((grid,), (block,), tuple(map(_argument, args)))


def _argument(x: Any) -> Any:
    """Convert an argument as the kernels declare it: numbers have 32 bits, None is a null pointer."""
    if x is None:
        return np.intp(0)
    return np.float32(x) if isinstance(x, float) else np.int32(x) if isinstance(x, int) else x


def source() -> str:
    """Return the source of all kernels; messages of the compiler name the files."""
    return "".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in SOURCES)


@functools.cache
def _module() -> cupy.RawModule:
    return cupy.RawModule(code=source(), options=OPTIONS)


@functools.cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)
