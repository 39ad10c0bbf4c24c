"""Compiled kernels are read from the disk cache, also by several processes, until their sources change. No GPU."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import SOURCE
from nvrtc import compiler

SMALL_KERNEL = "thd_plan_check"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setenv("THDATTN_CACHE_DIR", str(directory))
    return directory


def no_compiler(name, arch):
    raise AssertionError(f"{name} is compiled again")


def test_second_call_reads_the_cubin_and_does_not_compile(cache, monkeypatch):
    compiled, lowered, _ = compiler.compile_kernel(SMALL_KERNEL, "sm_90a")
    first = compiler.cached_cubin(SMALL_KERNEL, "sm_90a")
    monkeypatch.setattr(compiler, "compile_kernel", no_compiler)
    assert compiler.cached_cubin(SMALL_KERNEL, "sm_90a") == first == (compiled, lowered)
    assert len(list(cache.iterdir())) == 1
    for name, arch in ((SMALL_KERNEL, "sm_80"), ("thd_plan_rows", "sm_90a")):
        with pytest.raises(AssertionError, match="compiled again"):
            compiler.cached_cubin(name, arch)


def test_a_compilation_is_logged_and_a_hit_is_not(cache, caplog):
    with caplog.at_level(logging.INFO, "thdattn"):
        compiler.cached_cubin(SMALL_KERNEL, "sm_80")
        (record,) = caplog.records
        assert record.name == "thdattn" and record.levelno == logging.INFO
        said = re.fullmatch(rf"compiled {SMALL_KERNEL} for sm_80 in \d+\.\d s, (\d+) registers", record.getMessage())
        assert said
        _, lowered, compiler_log = compiler.compile_kernel(SMALL_KERNEL, "sm_80")
        own = re.search(rf"'{lowered}'.*?Used (\d+) registers", compiler_log, re.DOTALL)
        assert said[1] == own[1], "the registers of this kernel, not of another one of the same source"
        compiler.cached_cubin(SMALL_KERNEL, "sm_80")
        assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:-1], lambda whole: b"\xff" * 200],
                         ids=["empty", "truncated", "foreign"])
def test_damaged_file_is_compiled_again_and_replaced(damage, cache):
    right = compiler.cached_cubin(SMALL_KERNEL, "sm_80")
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert compiler.cached_cubin(SMALL_KERNEL, "sm_80") == right
    assert path.read_bytes() == whole


def test_kernels_are_compiled_without_a_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("THDATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cubin, _ = compiler.cached_cubin(SMALL_KERNEL, "sm_80")
    assert cubin.startswith(b"\x7fELF")


PROGRAM = f"""
import hashlib, os, sys, time
from thdattn.jit import compiler
print("ready", flush=True)
sys.stdin.readline()
cubin, lowered = compiler.cached_cubin({SMALL_KERNEL!r}, "sm_80")
print(hashlib.sha256(cubin).hexdigest(), lowered, flush=True)
"""


def start(directory: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "THDATTN_CACHE_DIR": str(directory)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_four_processes_that_compile_at_once_agree_and_leave_one_whole_file(cache):
    ranks = [start(cache) for _ in range(4)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    seen = set()
    while any(rank.poll() is None for rank in ranks):
        seen |= {path.read_bytes() for path in cache.glob("*.cubin")}
        time.sleep(0.001)
    outputs = {rank.communicate()[0] for rank in ranks}
    assert all(rank.returncode == 0 for rank in ranks)
    assert len(outputs) == 1
    (path,) = cache.iterdir()
    assert seen <= {path.read_bytes()}, "nobody saw half a file"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return (a cache with the kernel, its name in the cubin)."""
    directory = tmp_path_factory.mktemp("compiled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THDATTN_CACHE_DIR", str(directory))
        return directory, compiler.cached_cubin(SMALL_KERNEL, "sm_80")[1]


@pytest.mark.parametrize("changed", compiler.device_files())
def test_changed_source_is_compiled_anew(changed, compiled, cache, edited):
    directory, lowered = compiled
    shutil.copytree(directory, cache)
    hashed = compiler.source_hash()
    edited(changed, lambda text: f"{text}\n// another comment\n")
    assert compiler.cached_cubin(SMALL_KERNEL, "sm_80")[1] == lowered
    assert compiler.source_hash() == hashed, "comments compile to nothing"
    its_files = compiler.files(SMALL_KERNEL)  # not what attention kernels are made of
    assert len(list(cache.iterdir())) == (2 if changed in its_files else 1)
