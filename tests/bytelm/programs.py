"""Starts the example's programs, for every test that runs one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch import SOURCE, run_ranks

BYTELM = SOURCE.parent / "examples" / "bytelm"
TRAIN, SAMPLE = BYTELM / "train.py", BYTELM / "sample.py"
MISBEHAVE = Path(__file__).with_name("misbehave.py")


def start(ranks: int, program: Path, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a program as one process without MPI, or as ranks under mpiexec."""
    arguments = [str(word) for word in words]
    if ranks > 1:
        return run_ranks(ranks, program, *arguments, timeout=timeout)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def options(**values: object) -> list[str]:
    """lr=1 -> --lr 1; a value of True is a flag."""
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    return [str(word) for flag, value in flags for word in ((flag,) if value is True else (flag, value))]


def small(documents: Path, **changed: object) -> list[str]:
    """Options of a run that takes a second."""
    values = {"data": documents, "tokens": 96, "longest": 64, "steps": 12, "val_bytes": 200, "accumulate": 2}
    return options(**values | changed)


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """What train.py --metrics has written."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def validations(metrics: Path) -> list[float]:
    """Bits per byte of every validation."""
    return [line["validation_bits_per_byte"] for line in lines_of(metrics) if "validation_bits_per_byte" in line]
