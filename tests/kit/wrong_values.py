"""Values that no argument takes, and what every error about one must say."""

from __future__ import annotations

import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import thdattn

FLOAT8 = ml_dtypes.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
BATCH = thdattn.PackedBatch([0, 5, 7], [0, 6, 8])
MASKED = np.ma.masked_array(np.ones((8, 4, 8), np.float32), mask=True)


class OnAGpu:
    """An array on a GPU: whatever reads it, or prints it, fails the test."""

    def __init__(self, shape=(8, 4, 8), dtype="float32"):
        self.shape, self.dtype = shape, np.dtype(dtype)

    def __dlpack_device__(self):
        return (2, 0)

    def _read(self, *args, **kwargs):
        raise AssertionError("read values that lie on the GPU")

    __dlpack__ = __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __index__ = __float__ = __repr__ = _read
    __hash__ = None

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class DeviceOffsets(OnAGpu):
    """Offsets on a GPU, of which the host may read shape and dtype."""

    def __init__(self, num_offsets, dtype="int32"):
        super().__init__((num_offsets,), dtype)

    __array__ = __lt__ = OnAGpu._read


class Gradient:
    """A tensor that requires grad, as PyTorch refuses to hand it out."""

    requires_grad, shape = True, (8, 4, 8)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class NoDevice(Gradient):
    """A tensor without memory, such as those on PyTorch's device "meta"."""

    requires_grad = False

    def __dlpack_device__(self):
        raise ValueError("Unknown device type meta")


NO_INTS = (("8", "'8', a str"), (True, "True, a bool"), (np.True_, "np.True_, a bool"), (8.0, "8.0, a float"),
           (NAN, "nan, a float"), (None, "None, a NoneType"), ([4], "[4], a list"),
           (np.array(4), "a ndarray of shape ()"), (OnAGpu(), "a OnAGpu of shape (8, 4, 8)"))


def no_ints(*names):
    """Return rows for `table` of what no int argument of these names takes."""
    return [(name, value, TypeError, f"{name} is {found}; wanted an int") for name in names for value, found in NO_INTS]


def refuses(call, argument, value, kind, message):
    """Assert that call(argument=value) raises this error, and that all four parts are in its message."""
    is_refused(partial(call, **{argument: value}), kind, message)


def is_refused(call, kind, message):
    """Assert that call() raises this error with name, found, wanted and remedy; " … " stands for anything."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert re.search(".*".join(map(re.escape, message.split(" … "))), text), text
    assert type(caught.value) is kind
    assert re.match(r"[a-z_]+(\[\d+\]|\.\w+)? ", text), "begins with the name"
    assert re.search("wanted|needs", text) and ";" in text and len(text) < 500, "says what was wanted, and the remedy"


def table(*rows):
    """Parametrise a test with the rows, named after what they pass."""
    return pytest.mark.parametrize(
        ("argument", "value", "kind", "message"), [pytest.param(*row, id=f"{row[0]}-{i}") for i, row in enumerate(rows)]
    )


def calls(*rows):
    """Parametrise a test with rows (call, kind, message) for is_refused, named after their messages."""
    return pytest.mark.parametrize(
        ("call", "kind", "message"), [pytest.param(*row, id=f"{row[2][:40]}-{i}") for i, row in enumerate(rows)])
