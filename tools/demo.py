"""Trains a small language model across ranks and prints what it writes: demo.py [options of examples/bytelm/train.py].

On a CPU that is the tiny model, in about a minute; on GPUs as well, in less.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile

import ranks

TRAIN, SAMPLE = "examples/bytelm/train.py", "examples/bytelm/sample.py"


def main() -> int:
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends the training; the sample of what was learnt still comes
    with tempfile.TemporaryDirectory() as folder:
        trained = run(ranks.command(TRAIN, "--size", "tiny", "--checkpoint", folder, *sys.argv[1:]))
        return trained or run([sys.executable, SAMPLE, "--checkpoint", folder, "--prompt", "def "])


def run(line: list[str]) -> int:
    print("+", *line, "\n", flush=True)
    return subprocess.run(line, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
