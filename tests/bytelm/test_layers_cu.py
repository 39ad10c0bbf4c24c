"""The kernels of the example compile for every architecture without spills. No GPU, and no cuBLAS."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nvrtc import compiler

layers_cuda, nvrtc = pytest.importorskip("layers_cuda"), compiler.nvrtc
LAUNCHED = set(re.findall(r'(?:launch|early)\(\s*"(\w+)"', Path(layers_cuda.__file__).read_text()))


def test_missing_cublas_is_named_with_a_command_that_installs_it(monkeypatch):
    class Cuda:
        nvrtc = nvrtc

        @property
        def cublas(self):
            raise ImportError('Failure finding "libcublas.so"\n listdir: ...')

    monkeypatch.setattr(layers_cuda.cupy, "cuda", Cuda())
    layers_cuda.load.cache_clear()
    with pytest.raises(RuntimeError, match=r'cuBLAS is missing, .*"libcublas.so"\); .*pip install -e "\.\[') as error:
        layers_cuda.load()
    extra = re.search(r"\[(\w+)\]", str(error.value))[1]
    assert f"{extra} = [" in (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize("arch", [
    "sm_90a", *(pytest.param(arch, marks=pytest.mark.exhaustive) for arch in ("sm_80", "sm_100", "sm_120"))])
def test_kernels_compile_and_do_not_spill(arch):
    program = nvrtc.createProgram(layers_cuda.source(), "layers.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *layers_cuda.OPTIONS, "--ptxas-options=-v"))
    except nvrtc.NVRTCError as error:
        pytest.fail(f"{error}\n{nvrtc.getProgramLog(program)}")
    log = nvrtc.getProgramLog(program)
    entries = dict(re.findall(r"Compiling entry function '(\w+)'.*?\n(.*?)(?=Compiling entry|\Z)", log, re.DOTALL))
    assert set(entries) == LAUNCHED, "what is launched exists, and what exists is launched"
    for name, entry in entries.items():
        spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", entry)
        assert spilled == ["0"] * 3, f"{name} for {arch} spills: {entry}"
