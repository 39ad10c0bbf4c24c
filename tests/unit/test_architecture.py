"""Who may import whom, and that the package works with neither a GPU nor MPI installed."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from launch import SOURCE

PACKAGE = SOURCE / "thdattn"

# A folder, or a module beside the folders, imports from itself and from those before it.
LAYERS = [
    "arguments", "install", "trees", "packing", "balance", "capacity", "sharding", "oracle", "kernels", "spans", "jit",
    "comm", "plan", "kv_cache", "methods", "engines", "attention", "mamba", "varlen", "graphs",
    "timeline", "costs", "torch", "cli", "fuzz", "__main__",
]
CONTRACT = "engines"  # what an engine has to do, without any: a plan and what comes after it may import it
# Engines are handed to these as arguments, or named by strings.
WITHOUT_ENGINES = {"__init__", "attention", "engines.select", "mamba.mixer", "mamba.context_parallel"}
ENGINES = ("engines.reference", "engines.cuda", "mamba.reference", "mamba.cuda", "jit.compiler")
# Where a library may be imported: when the module is loaded, and at all.
WHEN_LOADED = {"cupy": {"jit.compiler", "jit.tensor_map", *(f"engines.cuda.{name}" for name in (
                   "launch", "lengths", "plan", "rows", "scheduler", "forward", "backward", "decode", "softcap"))},
               "mpi4py": set(), "torch": {"torch"}, "jax": set()}
EVER = {"cupy": {*WHEN_LOADED["cupy"], "comm.local", "comm.nccl.gpus", "comm.overlap.blocks", "comm.overlap.transport",
                 "comm.peer.shared_memory", "comm.peer.windows", "engines.select", "graphs.capture",
                 "graphs.static_pack", "cli.info", "costs.measure", "spans", "varlen"},
        "mpi4py": {"comm.mpi", "cli.info"}, "torch": {"torch", "comm.torch"}, "jax": set()}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """(dotted name, whether it is imported when the module is loaded) of every import statement."""
    return list(_imports(ast.parse(FILES[module].read_text()), True))


def _imports(node: ast.AST, when_loaded: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, when_loaded) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from ((f"{child.module}.{alias.name}", when_loaded) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, False)
        else:
            yield from _imports(child, when_loaded and not isinstance(child, ast.FunctionDef))


def imported(module: str) -> Iterator[tuple[str, bool]]:
    """(module of the package, whether it is imported when the other one is loaded) of every import of the package."""
    for name, when_loaded in imports(module):
        if name.split(".")[0] == "thdattn":
            parts = name.split(".")[1:]
            found = [x for n in range(len(parts), 0, -1) if (x := ".".join(parts[:n])) in FILES]
            yield (found or ["__init__"])[0], when_loaded


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[0])


def test_every_allocation_of_the_cuda_engine_comes_from_one_function():
    # Tests fill what it returns with NaN; a module that had the name itself would not see that.
    for module, path in FILES.items():
        if not module.startswith(("engines.cuda", "mamba.cuda")):
            continue
        has_name = "thdattn.engines.cuda.launch.empty" in dict(imports(module))
        assert module in ("engines.cuda", "engines.cuda.launch") or not has_name, module
        made = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
                and ast.unparse(node) in ("cupy.empty", "cupy.empty_like")]
        assert len(made) == (module == "engines.cuda.launch"), module


def test_folders_are_small_enough_to_be_seen_at_once():
    for folder in {path.parent for path in FILES.values()}:
        assert len([*folder.glob("*.py")]) <= 15, folder


def test_modules_import_from_their_own_layer_and_those_below():
    for module in FILES.keys() - {"__init__"}:
        contract = {CONTRACT} if layer(module) >= LAYERS.index("plan") else set()
        others = {other for other, _ in imported(module)} - contract
        above = {other for other in others if other == "__init__" or layer(other) > layer(module)}
        assert above <= ({"__init__"} if module.split(".")[0] in ("cli", "__main__") else set()), module


def test_no_modules_import_each_other_when_they_are_loaded():
    needs = {module: {other for other, when_loaded in imported(module) if when_loaded} - {module} for module in FILES}
    graphlib.TopologicalSorter(needs).prepare()


def test_methods_and_attention_do_not_import_the_engines():
    for module in WITHOUT_ENGINES:
        assert not [other for other, _ in imported(module) if other.startswith(ENGINES)], module


@pytest.mark.parametrize("oracle", ["oracle", "mamba.oracle"])
def test_oracle_shares_no_code_with_what_it_judges(oracle):
    assert [name for name, when_loaded in imports(oracle) if when_loaded and name.startswith("thdattn")] == []


@pytest.mark.parametrize("library", EVER)
def test_library_is_imported_only_where_it_belongs(library):
    loaded, ever = set(), set()
    for module in FILES:
        for name, when_loaded in imports(module):
            if name.split(".")[0] == library:
                ever.add(module)
                if when_loaded:
                    loaded.add(module)
    assert loaded <= WHEN_LOADED[library]
    assert ever <= EVER[library]


WITHOUT_GPU_AND_MPI = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cupy", "cupy_backends", "cupyx", "mpi4py", "nvidia", "torch", "jax"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import thdattn
from thdattn.comm.nccl import comm  # which tests on any machine play with
from thdattn.comm.peer import transport, windows

batch = thdattn.PackedBatch.from_lengths([7, 3], multiple=4)

def program(comm):
    attention = thdattn.CPAttention(comm, 2, 8)
    assert attention.engine == "reference"
    plan = attention.plan(batch)
    x = np.ones((plan.local_rows, 2, 8), attention.dtype)
    out, saved = attention.forward(x, x, x, plan, return_max_logit=True)
    return [out, *attention.backward(x, saved)]

with thdattn.comm.init() as comm:
    (alone,) = thdattn.comm.run_local(1, program)
ranks = thdattn.comm.run_local(2, program)
assert thdattn.graphs.normalize(cuda_graph_impl="local").inference_scope == "layer"
valid = [thdattn.Sharding(batch, 2).unshard([made[i] for made in ranks]) for i in range(4)]
assert all((x == y).all() for x, y in zip(alone[:1], valid[:1]))
attempts = {"cuda": lambda: thdattn.CPAttention(thdattn.comm.init("single"), 2, 8, engine="cuda"),
            "mpi": lambda: thdattn.comm.init("mpi"), "nccl": lambda: thdattn.comm.init("nccl")}
for wanted, attempt in attempts.items():
    try:
        attempt()
    except RuntimeError as error:
        print(wanted, "->", error)
assert not [name for name in sys.modules if name.split(".")[0] in ("cupy", "mpi4py")]
print("works")
"""


def test_package_works_with_neither_cupy_nor_mpi4py_installed():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "MV2"))}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_GPU_AND_MPI], capture_output=True, text=True, timeout=60, check=False,
        env={**clean, "PYTHONPATH": str(SOURCE)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("works\n")
    assert "cuda -> engine is 'cuda', but CuPy finds no usable GPU (ImportError: cupy is blocked)" in run.stdout
    assert "mpi -> MPI cannot be loaded (ImportError: mpi4py" in run.stdout and "pip install" in run.stdout


def test_importing_the_package_loads_no_library_but_numpy_and_ml_dtypes():
    program = "import sys, thdattn; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
                         env={**os.environ, "PYTHONPATH": str(SOURCE)})
    loaded = set(run.stdout.split())
    assert "numpy" in loaded and not loaded & {"cupy", "mpi4py", "torch", "matplotlib", "pytest"}
