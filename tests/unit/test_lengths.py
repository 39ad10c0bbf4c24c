"""What fits a screen: lines of 120 columns, functions of 60 lines (150 in device code)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import SOURCE

ROOT = SOURCE.parent
FILES = [path for folder in ("src", "tests", "benchmarks", "examples", "tools")
         for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".cu", ".cuh")]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function."""
    return _python(path.read_text()) if path.suffix == ".py" else _cuda(path.read_text().splitlines())


def _python(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def _cuda(lines: list[str]) -> Iterator[tuple[str, int]]:
    """From the line with __device__ or __global__ to the brace that closes, which has the same indent."""
    for begin, line in enumerate(lines):
        code = line.split("//")[0].rstrip()
        if re.search(r"__(device|global)__", code) and not code.endswith(("}", ";", "\\")):
            indent = re.match(" *", line)[0]
            end = lines.index(indent + "}", begin)
            yield line.strip(), end - begin + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_fits_a_screen(path):
    lines = path.read_text().splitlines()
    assert [line for line in lines if len(line) > 120] == []
    assert [(name, size) for name, size in functions(path) if size > (60 if path.suffix == ".py" else 150)] == []


def test_functions_are_found_in_device_code():
    kernels = dict(functions(SOURCE / "thdattn" / "kernels.cu"))
    assert [size for name, size in kernels.items() if "sequence_of" in name] == [8]
    text = (SOURCE / "thdattn" / "kernels.cu").read_text()
    assert sum("__global__" in name for name in kernels) == text.count("__global__ ")


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(SOURCE) and path.suffix != ".py"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_above_every_kernel_stands_what_it_does_and_how_it_is_launched(path):
    lines = path.read_text().splitlines()
    for kernel in (i for i, line in enumerate(lines) if "__global__ " in line):
        above = kernel - 1
        while lines[above].startswith(("template", "  ")):
            above -= 1
        comment = []
        while lines[above].startswith("//"):
            comment.append(lines[above])
            above -= 1
        assert "Launch:" in " ".join(comment), f"{lines[kernel]}: {comment}"
