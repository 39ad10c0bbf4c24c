"""What fits a screen and a head: lines of 120 columns, functions of 60 lines (150 in device code), 7 parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from launch import SOURCE

ROOT = SOURCE.parent
FILES = [path for folder in ("src", "tests", "benchmarks", "examples", "tools")
         for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".cu", ".cuh")]


# Kernels that are longer, with their lines: dividing them would change their machine code.
LONGER = {("portable/backward.cu", 173), ("hopper/forward.cu", 154)}


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


def test_lines_and_functions_fit_a_screen():
    wide = [f"{path}:{number}" for path in FILES
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
    long = [f"{path}: {name} has {size} lines" for path in FILES
            for name, size in functions(path) if size > (60 if path.suffix == ".py" else 150)
            and (f"{path.parent.name}/{path.name}", size) not in LONGER]
    assert wide + long == []


# Functions that users call by keyword, with the arguments of a layer or of flash_attn_varlen_func.
CALLED_BY_KEYWORD = {"CPAttention", "Mamba2Mixer", "attention", "packed_attention", "varlen_attention"}


def _parameters(node: ast.AST, owner: str = "") -> Iterator[tuple[str, int]]:
    """(name, number of parameters but self) of every function; a constructor has the name of its class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            given = child.args
            names = {x.arg for x in [*given.posonlyargs, *given.args, *given.kwonlyargs]} - {"self", "cls"}
            yield owner if child.name == "__init__" else child.name, len(names) + bool(given.vararg) + bool(given.kwarg)
        yield from _parameters(child, child.name if isinstance(child, ast.ClassDef) else owner)


def test_functions_have_at_most_7_parameters():
    many = {name for path in sorted((SOURCE / "thdattn").rglob("*.py"))
            for name, number in _parameters(ast.parse(path.read_text())) if number > 7}
    assert many == CALLED_BY_KEYWORD


def test_functions_are_found_in_device_code():
    text = (SOURCE / "thdattn" / "kernels.cu").read_text()
    kernels = dict(functions(SOURCE / "thdattn" / "kernels.cu"))
    assert [size for name, size in kernels.items() if "sequence_of" in name] == [8]
    assert sum("__global__" in name for name in kernels) == text.count("__global__ ")
