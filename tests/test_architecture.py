"""Who may import whom, and that the package works with neither a GPU nor MPI installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from launch import SOURCE

PACKAGE = SOURCE / "thdattn"

# A module imports from the layers before its own. The engines, reference and ops, are handed to the methods as
# arguments; nothing below check imports them.
LAYERS = [
    {"arguments", "buffers", "flops", "generations", "handles", "install", "instances", "memory", "structs", "wgmma",
     "kernel_cache"},
    {"hopper_tiles"},
    {"tiles"},
    {"packing", "jit", "mixer_shape"},
    {"balanced", "mask", "sums"},
    {"comm"},
    {"sharding", "routes", "rank_rows", "engines", "tensor_map", "oracle", "mamba_oracle", "mixer_tiles"},
    {"plan", "decode_tiles", "mixer_backward_tiles"},
    {"homes", "host_plan", "host_rows", "host_ssd", "host_blocks", "cache", "room", "planning", "checks"},
    {"host_conv", "host_decode", "host_mixer_gate"},
    {"host_mixer_decode"},
    {"reference", "ops", "methods", "tile_counts"},
    {"saved", "mamba_saved"},
    {"mamba_cache"},
    {"attention", "mamba"},
    {"graphs", "varlen", "costs"},
    {"torch", "measured_rates"},
    {"info", "check", "fuzz", "pack_stats"},
    {"advise"},
    {"__main__"},
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
# Where a library may be imported: when the module is loaded, and at all.
OPS = {"ops", "ops.launch", "ops.plan", "ops.rows", "ops.scheduler", "ops.forward", "ops.backward", "ops.decode",
       "ops.mixer_decode", "ops.logits"}
WHEN_LOADED = {"cupy": {"jit", *OPS, "tensor_map"}, "mpi4py": set(), "torch": {"torch"}, "jax": set()}
EVER = {"cupy": {*WHEN_LOADED["cupy"], "comm.local", "comm.nccl", "comm.peer", "comm.shared_memory", "comm.windows",
                 "engines", "graphs.capture", "graphs.upload", "info", "measured_rates", "varlen"},
        "mpi4py": {"comm.mpi", "comm.nccl", "info"}, "torch": {"torch", "comm.torch"}, "jax": set()}


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


def own(name: str) -> str:
    """The module of the package that `thdattn.x.y` comes from: x, or "" for the package itself."""
    part = name.removeprefix("thdattn").removeprefix(".").split(".")[0]
    return part if part in LAYER or (PACKAGE / f"{part}.py").exists() else ""


def test_every_allocation_of_the_cuda_engine_comes_from_one_function():
    # Tests fill what it returns with NaN; a module that had the name itself would not see that.
    for module, path in FILES.items():
        if module.split(".")[0] != "ops":
            continue
        assert module in ("ops", "ops.launch") or "thdattn.ops.launch.empty" not in dict(imports(module)), module
        made = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
                and ast.unparse(node) in ("cupy.empty", "cupy.empty_like")]
        assert len(made) == (module == "ops.launch"), module


def test_every_module_has_a_layer():
    missing = {module.split(".")[0] for module in FILES} - set(LAYER) - {"__init__"}
    assert not missing, f"say in LAYERS where {missing} belong"


@pytest.mark.parametrize("module", [module for module in FILES if module != "__init__"])
def test_imports_point_downwards(module):
    here = module.split(".")[0]
    for name, _ in imports(module):
        if name.split(".")[0] != "thdattn":
            continue
        there = own(name)
        if there == here and here in ("comm", "fuzz", "graphs", "methods", "ops"):
            continue
        assert there or here in ("info", "check", "advise", "__main__"), f"{module} imports the package itself: {name}"
        assert not there or LAYER[there] < LAYER[here], f"{module} imports {name}, which is not below it"


def test_methods_and_attention_do_not_import_the_engines():
    methods = [module for module in FILES if module.split(".")[0] == "methods"]
    for module in (*methods, "attention", "mamba", "engines", "plan", "planning", "__init__"):
        below = {own(name) for name, _ in imports(module) if name.startswith("thdattn")}
        assert not below & {"reference", "ops", "jit"}, module


@pytest.mark.parametrize("oracle", ["oracle", "mamba_oracle"])
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
from thdattn.comm import nccl, peer, windows  # which tests on any machine play with

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
    )  # fmt: skip
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
