"""Arrays of other libraries on the host: JAX, torch, and memory pinned for a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cases import BFLOAT16, Case, random_inputs, step

import thdattn
from thdattn.engines import reference

CASE = Case("frameworks", (7, 0, 20), dims=(8, 8), sharding="contiguous")


def drawn(dtype):
    """q, k, v, dout of the pack as NumPy arrays."""
    return random_inputs(CASE, np.dtype(dtype))


def computed(inputs, dtype):
    """What forward and backward of one rank return, by name."""
    attn = CASE.attention(thdattn.comm.init("single"), dtype, engine="reference")
    return step(attn, attn.plan(thdattn.PackedBatch.from_lengths(CASE.lengths), CASE.sharding), inputs)


def assert_same(found, wanted):
    for name, x in found.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)


def address(x):
    return x.__array_interface__["data"][0]


class Elsewhere:
    """A NumPy array whose DLPack says that it lies on a device of another type."""

    def __init__(self, array, device_type):
        self.array, self.device_type = array, device_type

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
        tensor = pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dltensor")
        ctypes.c_int32.from_address(tensor + 8).value = self.device_type
        return capsule


# --- pinned and managed memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device_type", [3, 13], ids=["pinned", "managed"])
def test_memory_that_cuda_pinned_or_manages_is_host_memory_to_the_numpy_engine(device_type):
    inputs = drawn(np.float32)
    assert_same(computed([Elsewhere(x, device_type) for x in inputs], "float32"), computed(inputs, "float32"))
    assert address(reference.from_user("q", Elsewhere(inputs[0], device_type))) == address(inputs[0])


def test_pinned_offsets_are_host_offsets():
    class Pinned(np.ndarray):
        def __dlpack_device__(self):
            return 3, 0

    batch = thdattn.PackedBatch(np.array([0, 7, 9], np.int32).view(Pinned))
    assert not batch.on_device
    assert batch.lengths.tolist() == [7, 2]


def test_managed_offsets_lie_on_a_gpu_that_may_still_write_them():
    assert thdattn.PackedBatch(Managed(), total_rows=9).on_device


class Managed:
    dtype, shape = np.dtype(np.int32), (3,)

    def __dlpack_device__(self):
        return 13, 0


def test_gpu_memory_is_refused_by_the_numpy_engine():
    with pytest.raises(TypeError, match=r"q is a test_frameworks\.Elsewhere, wanted a NumPy array"):
        reference.from_user("q", Elsewhere(drawn(np.float32)[0], 2))


@pytest.mark.gpu
def test_pinned_and_managed_arrays_on_a_gpu_machine(cupy, torch_cuda):
    """Pinned: host memory alone. Managed: an array for either engine."""
    torch = pytest.importorskip("torch")
    inputs = drawn(np.float32)
    pinned = [torch.from_numpy(x).pin_memory() for x in inputs]
    assert pinned[0].__dlpack_device__()[0] == 3
    assert_same(computed(pinned, "float32"), computed(inputs, "float32"))
    batch = thdattn.PackedBatch(torch.tensor([0, 7, 7, 27], dtype=torch.int32).pin_memory())
    assert batch.lengths.tolist() == list(CASE.lengths)
    from thdattn.engines import cuda

    with pytest.raises(TypeError, match="q is a Tensor on the host, wanted an array on the GPU"):
        cuda.from_user("q", pinned[0])
    managed = cupy.ndarray(inputs[0].shape, np.float32, memptr=cupy.cuda.malloc_managed(inputs[0].nbytes))
    managed.set(inputs[0])
    assert managed.__dlpack_device__()[0] == 13
    assert cuda.from_user("q", managed) is managed
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(reference.from_user("q", managed), inputs[0])


# --- JAX -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_arrays_on_the_host_go_in_without_a_copy_and_results_come_out(dtype):
    jax = pytest.importorskip("jax")
    host = jax.devices("cpu")[0]
    inputs = drawn(dtype if dtype != "bfloat16" else BFLOAT16)
    arrays = [jax.device_put(x, host) for x in inputs]
    seen = reference.from_user("q", arrays[0])
    assert seen.dtype == inputs[0].dtype and address(seen) == arrays[0].unsafe_buffer_pointer()
    found = computed(arrays, dtype)
    assert_same(found, computed(inputs, dtype))
    for name in ("out", "dq", "dk", "dv"):
        back = jax.numpy.asarray(found[name], device=host)
        assert isinstance(back, jax.Array) and back.dtype == found[name].dtype == inputs[0].dtype
        np.testing.assert_array_equal(np.asarray(back), found[name], err_msg=name)


# --- torch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torch_tensors_on_the_host_go_in_without_a_copy(dtype):
    torch = pytest.importorskip("torch")
    inputs = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in drawn(np.float32)]
    seen = reference.from_user("q", inputs[0])
    assert address(seen) == inputs[0].data_ptr()
    np.testing.assert_array_equal(seen.astype(np.float64), inputs[0].double().numpy())
    kept = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    assert_same(computed(inputs, dtype), computed([x.double().numpy().astype(kept) for x in inputs], dtype))
