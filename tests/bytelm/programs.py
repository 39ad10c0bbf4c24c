"""Runs of the example's programs, as processes and in this one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import train
from launch import SOURCE, run, run_ranks

import thdattn

BYTELM = SOURCE.parent / "examples" / "bytelm"
TRAIN, SAMPLE = BYTELM / "train.py", BYTELM / "sample.py"
MISBEHAVE = Path(__file__).with_name("misbehave.py")
NOBODY_INTERRUPTS = SimpleNamespace(requested=False)


def start(ranks: int, program: Path, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program as one process without MPI, or as ranks under mpiexec."""
    arguments = [str(word) for word in words]
    if ranks > 1:
        return run_ranks(ranks, program, *arguments, timeout=timeout)
    return run([sys.executable, str(program), *arguments], timeout)


def options(**values: object) -> list[str]:
    """Return command-line options: lr=1 -> --lr 1; a value of True is a flag."""
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    return [str(word) for flag, value in flags for word in ((flag,) if value is True else (flag, value))]


def small(documents: Path, **changed: object) -> list[str]:
    """Return options of a run that takes a second."""
    values = {"data": documents, "tokens": 96, "longest": 64, "steps": 12, "val_bytes": 200, "accumulate": 2}
    return options(**values | changed)


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """Read the file of train.py --metrics."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def validations(metrics: Path) -> list[float]:
    """Return the bits per byte of every validation."""
    return [line["validation_bits_per_byte"] for line in lines_of(metrics) if "validation_bits_per_byte" in line]


def losses(metrics: Path) -> list[float]:
    """Return the loss of every step."""
    return [line["loss"] for line in lines_of(metrics) if "loss" in line]


def arguments(monkeypatch: pytest.MonkeyPatch, *words: object) -> argparse.Namespace:
    """Parse options of train.py."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    return train.parse_arguments()


def trained(monkeypatch: pytest.MonkeyPatch, ranks: int, *words: object) -> None:
    """Run train.py on simulated ranks of this process."""
    args = arguments(monkeypatch, *words)
    thdattn.comm.run_local(ranks, lambda comm: train.train(comm, args, NOBODY_INTERRUPTS))


def refused(monkeypatch: pytest.MonkeyPatch, ranks: int, *words: object) -> list[Any]:
    """Return the Failure of every rank, of a run that must end before its first step."""
    args, failures = arguments(monkeypatch, *words), []

    def program(comm: thdattn.comm.Comm) -> None:
        with pytest.raises(train.command_line.Failure) as failure:
            train.train(comm, args, NOBODY_INTERRUPTS)
        failures.append(failure.value)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", None)
        thdattn.comm.run_local(ranks, program, timeout=60)
    return failures
