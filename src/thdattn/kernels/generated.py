"""Generate CUDA source: wrappers of the wgmma instruction, and checks of constants that Python repeats.

The operand lists of wgmma are too long to write by hand. An accumulator of N columns is float[N / 8][4] per thread.
Block j holds columns 8j + 2 * (lane % 4) and the next. Elements 0 and 1 are of row lane / 4 of the warp's 16 rows, and
elements 2 and 3 of row lane / 4 + 8.

Source: PTX ISA 9.7.15, asynchronous warpgroup level matrix instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


def constant_checks(constants: Mapping[str, int | Callable[[int], int]]) -> str:
    """Write a macro CHECK_<constant> for every constant that Python has too, to stand after its definition in CUDA.

    A constant that depends on the columns of a row is a function of them in both.
    """
    return "".join(_constant_check(name, value) for name, value in constants.items())


def _constant_check(name: str, value: int | Callable[[int], int]) -> str:
    found = {name: value} if isinstance(value, int) else {f"{name}({cols})": value(cols) for cols in range(32, 257, 16)}
    asserts = (f'static_assert({one} == {wanted}, "{one} is not what Python has")' for one, wanted in found.items())
    return f"#define CHECK_{name} " + "; ".join(asserts) + "\n"


def wrappers(columns: Iterable[int]) -> str:
    """Write Wgmma<T, N>::shared (A and B in shared memory) and ::registers (A in registers) for N in `columns`."""
    head = '#pragma once\n\n#include "kernels/common.cuh"\n\ntemplate <typename T, int kColumns> struct Wgmma;\n'
    return head + "".join(_wrapper(t, n) for t in ("bf16", "f16") for n in columns)


def _wrapper(dtype: str, columns: int) -> str:
    num = columns // 2
    outputs = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(num))
    registers = ", ".join(f"%{i}" for i in range(num))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype}"

    def body(a: str, num_a: int, a_inputs: str, flags: str, flag_inputs: str) -> str:
        b, accumulate = num + num_a, num + num_a + 1
        return (
            f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{accumulate}, 0; {instruction} {{{registers}}}, {a}, '
            f'%{b}, p, 1, 1, {flags}; }}"\n        : {outputs}\n        : {a_inputs}, "l"(b), "r"(accumulate), '
            f"{flag_inputs});\n"
        )

    flag = num + 3
    a_list = "{" + ", ".join(f"%{num + i}" for i in range(4)) + "}"
    shared = body(f"%{num}", 1, '"l"(a)', f"%{flag}, %{flag + 1}", '"n"(kTransposeA), "n"(kTransposeB)')
    registers_a = body(a_list, 4, ", ".join(f'"r"(a[{i}])' for i in range(4)), f"%{num + 6}", '"n"(kTransposeB)')
    return (
        f"template <> struct Wgmma<{dtype}, {columns}> {{\n"
        f"  template <int kTransposeA, int kTransposeB> static __device__ __forceinline__ void shared(\n"
        f"      float (&d)[{columns // 8}][4], u64 a, u64 b, int accumulate) {{\n{shared}  }}\n"
        f"  template <int kTransposeB> static __device__ __forceinline__ void registers(\n"
        f"      float (&d)[{columns // 8}][4], const u32 (&a)[4], u64 b, int accumulate) {{\n{registers_a}  }}\n"
        f"}};\n"
    )
