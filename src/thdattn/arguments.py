"""Checks of user arguments: numbers, flags, choices, masks, and arrays of the host or of an engine.

No check reads an array on a GPU, not even for a message: that would make the host wait.
"""

from __future__ import annotations

import cmath
import math
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = Any  # a NumPy array on the host, a CuPy array on a GPU
INT32_MAX = 2**31 - 1
# DLPack device types: host memory and pinned host memory, which the host reads; managed memory, which a GPU reads too.
DLPACK_HOST = frozenset({1, 3})
DLPACK_MANAGED = 13
UNLIMITED = 2**30  # a window this wide counts as unlimited, so that position + window fits in int32


class _Short(reprlib.Repr):
    """Short repr of a value, in which every array is its type and shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = 100

    def repr1(self, x: Any, level: int) -> str:
        if is_array(x):
            return f"a {type(x).__name__} of shape {tuple(getattr(x, 'shape', ()))}"
        return super().repr1(x, level)


def shown(value: Any) -> str:
    """Return a short repr of a value, for a message."""
    return _Short().repr(value)


def found(value: Any) -> str:
    """Return a short repr of a value with its type, for a message about a wrong type."""
    return shown(value) if is_array(value) else f"{shown(value)}, a {type(value).__name__}"


def in_units(num_bytes: int) -> str:
    """Return a number of bytes in GiB or MiB, for a message."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def check_kind(name: str, value: Any, kind: type, remedy: str) -> None:
    """Raise a TypeError if the value is no instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {found(value)}; wanted a {kind.__name__}; {remedy}")


def check_same(what: str, made: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    """Raise a ValueError that names the first of the traits in which what was made before is not what is wanted."""
    if made != wanted:
        name = next(name for name in wanted if made[name] != wanted[name])
        raise ValueError(f"{what} {name} {made[name]}, wanted {wanted[name]}; {remedy}")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of any library, 0-d arrays included, NumPy scalars excluded."""
    return hasattr(value, "__dlpack__") and not isinstance(value, type)


def as_int(name: str, value: Any, remedy: str = "convert it with int()") -> int:
    """Return the value as a Python int; raise a TypeError with the name for others, also for bools and arrays."""
    try:
        if not isinstance(value, (bool, np.bool_)) and not is_array(value):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {found(value)}; wanted an int; {remedy}")


def as_count(
    name: str, value: Any, remedy: str = "pass a positive count", at_most: int = INT32_MAX, at_least: int = 1
) -> int:
    """Return the value as an int in [at_least, at_most]; raise a TypeError if it is no int, else a ValueError."""
    number = as_int(name, value)
    if number < at_least:
        raise ValueError(f"{name} is {number}, wanted >= {at_least}; {remedy}")
    if number > at_most:
        raise ValueError(f"{name} is {number}, wanted <= {at_most}; {remedy}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """Return the value as a bool; raise a TypeError for others, as "no" and 0.5 would count as True."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is {found(value)}; wanted True or False; pass one of these")


def as_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return the value if it is one of the choices; raise a TypeError if it is no str, else a ValueError."""
    *others, last = choices
    wanted = f"wanted {', '.join(map(repr, others))} or {last!r}; pass one of these"
    if not isinstance(value, str):
        raise TypeError(f"{name} is {found(value)}; {wanted}")
    if value not in (*others, last):
        raise ValueError(f"{name} is {shown(value)}, {wanted}")
    return value


def as_softmax_scale(value: Any) -> float:
    """Return the factor on q.k as a float; raise a TypeError if it is no number, a ValueError if not > 0 in float32."""
    return _as_positive("softmax_scale", value, "None is head_dim**-0.5")


def as_softcap(value: Any) -> float:
    """Return the cap of logits as a float; raise a TypeError if it is no number, a ValueError if not 0 or > 0."""
    if not is_array(value) and not isinstance(value, (bool, np.bool_)) and value == 0:
        return 0.0
    return _as_positive("softcap", value, "0 is no cap")


def as_norm_eps(value: Any) -> float:
    """Return the epsilon of a mean square as a float; raise a TypeError if it is no number, a ValueError if not > 0."""
    return _as_positive("norm_eps", value, "1e-5 is usual")


def _as_positive(name: str, value: Any, remedy: str) -> float:
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)) or is_array(value):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {shown(value)}, wanted a number; {remedy}") from None
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore", under="ignore"):
        in_float32 = np.float32(number)
    if not 0 < in_float32 < math.inf:
        raise ValueError(f"{name} is {shown(value)}, wanted a finite number > 0; {remedy}, and float32 must hold it")
    return number


def as_window(window: Any, causal: bool) -> tuple[int, int]:
    """Return (left, right), -1 = unlimited; causal is right = 0. TypeError for no pair of ints, else ValueError."""
    sides = window.tolist() if isinstance(window, np.ndarray) else window
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"window is {shown(window)}, wanted (left, right); pass (-1, -1) for no window")
    left, right = (as_int(f"window[{i}]", side, "-1 means unlimited") for i, side in enumerate(sides))
    if min(left, right) < -1:
        raise ValueError(f"window is {(left, right)}, wanted numbers >= -1; -1 means unlimited")
    if causal and right > 0:
        raise ValueError(
            f"window is {(left, right)} with causal=True, wanted a right side of -1 or 0, as a causal query sees no "
            f"later position; pass window=({left}, 0), or causal=False"
        )
    return -1 if left >= UNLIMITED else left, 0 if causal else -1 if right >= UNLIMITED else right


def dlpack_device(name: str, x: Any) -> int | None:
    """Return the DLPack device type of an array, None for objects without DLPack; TypeError if the array refuses."""
    if isinstance(x, type) or not hasattr(x, "__dlpack_device__"):
        return None
    if getattr(x, "is_neg", bool)():
        raise unreadable(name, x, "through DLPack, which would lose the sign of a lazily negated view",
                         f"pass {name}.resolve_neg()")
    try:
        return int(x.__dlpack_device__()[0])
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise unreadable(name, x, f"through DLPack ({error})", "pass a NumPy or CuPy array") from error


def lies_on_device(name: str, array: Any) -> bool:
    """Return whether an array is on a GPU; objects without DLPack count as on the host."""
    device = dlpack_device(name, array)
    return device is not None and device not in DLPACK_HOST


def as_host_array(name: str, x: Any) -> NDArray[Any]:
    """Return a host array, or numbers in lists, as a NumPy array.

    Raises:
        TypeError: a value that NumPy cannot read, such as an array on a GPU, or a masked array.
        ValueError: lists of different lengths.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; wanted plain values; "
                        f"pass x.filled(value)")
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        reason = str(error).split("\n")[0]
        if isinstance(error, ValueError) and not is_array(x):
            raise ValueError(f"{name} is no array ({reason}); wanted one dtype and lists of one length; "
                             f"pass a NumPy array") from error
        remedy = "copy it to the host first (.get() of CuPy, .cpu() of PyTorch), or pass a NumPy array"
        raise unreadable(name, x, f"as a NumPy array ({reason})", remedy) from error
    if array.ndim == 0 and array.dtype.kind in "OSU" and not is_array(x):
        raise TypeError(f"{name} is {found(x)}; wanted an array; pass a NumPy array, or numbers in a list")
    return array


def as_host_ints(name: str, x: Any) -> NDArray[Any]:
    """Return a host array of integers of any width, or ints in a list, as a NumPy array.

    Raises:
        TypeError: an array of another dtype, or no array; bools are no ints.
        ValueError: lists of different lengths.
    """
    array = as_host_array(name, x)
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind == "O":  # ints beyond 64 bits, or any objects
        for i, value in enumerate(array.ravel().tolist()):
            as_int(f"{name}[{i}]", value)
    elif array.dtype.kind not in "iu" or (isinstance(x, (list, tuple)) and {bool, np.bool_} & set(map(type, x))):
        kind = "bool" if array.dtype.kind in "iu" else array.dtype
        raise TypeError(f"{name} holds {kind} values, wanted ints; pass an int32 array or a list of ints")
    return array


def check_rows(name: str, array: ArrayLike, num_rows: int, remedy: str) -> NDArray[Any]:
    """Return the array as a NumPy array of num_rows rows; raise a TypeError or ValueError with name and remedy."""
    rows = as_host_array(name, array)
    if rows.shape[:1] != (num_rows,):
        raise ValueError(f"{name} has shape {rows.shape}, wanted {num_rows} rows; {remedy}")
    return rows


def check_arrays(
    name: str, arrays: Iterable[ArrayLike], num_rows: NDArray[np.integer[Any]], remedy: str
) -> list[NDArray[Any]]:
    """Return the arrays as NumPy arrays, after a check of their numbers of rows, trailing shapes and dtypes.

    Args:
        name: the caller's name of the list, for the error.
        arrays: arrays (num_rows[i], ...) of one trailing shape and dtype.
        num_rows: (num_arrays,) integers, required rows of every array.
        remedy: for the error, the remedy for a wrong number of arrays or rows.

    Raises:
        TypeError: arrays is no list of host arrays, or their dtypes differ.
        ValueError: a wrong number of arrays, of rows in one, or different trailing shapes.
    """
    if not np.iterable(arrays) or isinstance(arrays, (str, bytes, Mapping)):
        raise TypeError(f"{name} is {found(arrays)}; wanted a list of arrays; {remedy}")
    listed = list(arrays)
    if len(listed) != len(num_rows):
        raise ValueError(f"{name} holds {len(listed)} arrays, wanted {len(num_rows)}; {remedy}")
    checked = [
        check_rows(f"{name}[{i}]", array, wanted, remedy)
        for i, (array, wanted) in enumerate(zip(listed, num_rows.tolist(), strict=True))
    ]
    for i, array in enumerate(checked):
        if array.shape[1:] != checked[0].shape[1:]:
            raise ValueError(
                f"{name}[{i}] has trailing shape {array.shape[1:]}, wanted {checked[0].shape[1:]} as "
                f"{name}[0]; give all arrays the same shape after the first dimension"
            )
        if array.dtype != checked[0].dtype:
            raise TypeError(
                f"{name}[{i}] is {array.dtype}, wanted {checked[0].dtype} as {name}[0]; "
                f"convert it with .astype('{checked[0].dtype}')"
            )
    return checked


def as_fill(fill: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the fill as a 0-d array; raise a ValueError if the dtype changes its value beyond float rounding.

    NumPy alone would convert NaN to the smallest int, 1.5 to 1, and 1e6 in float16 to infinity.
    """
    is_number = not issubclass(dtype.type, (np.flexible, np.object_, np.datetime64, np.timedelta64))
    try:
        if is_array(fill) or (is_number and isinstance(fill, (str, bytes))):
            raise TypeError
        if is_number and dtype.kind != "c" and complex(fill).imag:
            raise ValueError
        with np.errstate(all="ignore"):
            made = np.full((), fill, dtype)
            held = not is_number or _is_rounded(complex(fill), complex(made[()]), complex(np.full((), 0.5, dtype)[()]))
    except (TypeError, ValueError, OverflowError):
        held = False
    if not held:
        raise ValueError(
            f"fill is {shown(fill)}, wanted one value that {dtype} can hold; pass such a value, or convert the arrays"
        )
    return made


def _is_rounded(number: complex, made: complex, half: complex) -> bool:
    """Return whether `made` is `number`, exactly or rounded by a float dtype, in which `half` is 0.5."""
    same_kind = cmath.isnan(made) == cmath.isnan(number) and cmath.isinf(made) == cmath.isinf(number)
    return made == number or (half == 0.5 and same_kind)


def as_array(
    name: str, x: Array, shape: tuple[int, ...], dtype: np.dtype[Any], shape_remedy: str, dtype_remedy: str
) -> Array:
    """Return an engine's array if it has this shape and dtype.

    Args:
        shape_remedy, dtype_remedy: the ends of the messages, behind the shape and the dtype wanted.

    Raises:
        TypeError: it has another dtype.
        ValueError: it has another shape.
    """
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, wanted {dtype}{dtype_remedy}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}, wanted {shape}{shape_remedy}")
    return x


def unreadable(name: str, x: Any, how: str, remedy: str) -> TypeError:
    """Return the error for an array that cannot be read; for a tensor with requires_grad it has another remedy."""
    if getattr(x, "requires_grad", False):
        remedy = f"pass {name}.detach(), or use thdattn.torch, which is part of PyTorch's autograd"
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    return TypeError(f"{name} is a {kind} that cannot be read {how}; wanted an array that can; {remedy}")
