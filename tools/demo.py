"""Train a small language model on several ranks, and print what it writes: demo.py [options of train.py].

The model is the tiny one, on CPUs and on GPUs; training takes a minute on 2 CPU cores. The model is saved in runs/demo,
in runs/demo2 and so on if that has a model, or in the folder of --checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import start

TRAIN, SAMPLE = "examples/bytelm/train.py", "examples/bytelm/sample.py"


def main() -> int:
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends the training; the sample still follows
    os.chdir(start.ROOT)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--plot", type=Path)
    chosen, options = parser.parse_known_args()
    if {"-h", "--help"} & set(options):
        return run([sys.executable, TRAIN, "--help"])
    folder = chosen.checkpoint or free_folder(Path("runs"))
    picture = chosen.plot or (folder / "curve.png" if importlib.util.find_spec("matplotlib") else None)
    options = ["--size", "tiny", *options, "--checkpoint", str(folder), *(["--plot", str(picture)] if picture else [])]
    if sys.stdout.isatty() and sys.stderr.isatty():
        options.append("--bar")  # the ranks see mpiexec, not the terminal
        os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    status = run(start.command(TRAIN, *options))
    if status:
        return status
    print()
    sample = [sys.executable, SAMPLE, "--checkpoint", str(folder), "--prompt", "def "]
    status = run(sample)
    curve = f", its curve is {picture}" if picture else ""
    print(f"\nThe model is in {folder}{curve}. This command writes more:\n")
    print(f"    PYTHONPATH=src {shlex.join([*sample, '--samples', '3'])}\n")
    return status


def free_folder(parent: Path) -> Path:
    """Return the first of demo, demo2, demo3, ... without a model, so that earlier models are kept."""
    names = itertools.chain(["demo"], (f"demo{number}" for number in itertools.count(2)))
    return next(parent / name for name in names if not (parent / name / "checkpoint.npz").exists())


def run(line: list[str]) -> int:
    print("+", shlex.join(line), "\n", flush=True)
    return subprocess.run(line, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
