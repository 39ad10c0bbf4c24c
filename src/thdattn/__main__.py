"""The command line, `python -m thdattn`: what this machine has (info), and whether it computes right (check)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import thdattn
from thdattn.check import check
from thdattn.info import info


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: as after `python -m thdattn`; those of the process by default.

    Returns:
        The exit status: 0, or 1 if `check` found a wrong result.
    """
    parser = argparse.ArgumentParser(prog="python -m thdattn", description=thdattn.__doc__)
    parser.add_argument("--version", action="version", version=f"thdattn {thdattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, GPUs, where every library came from, and what is missing")
    checker = commands.add_parser(
        "check", help="run packs and masks of every kind against float64; under mpiexec on the real ranks"
    )
    checker.add_argument("--engine", choices=("auto", "cuda", "reference"), default="auto")
    chosen = parser.parse_args(arguments)
    return info() if chosen.command == "info" else check(chosen.engine)


if __name__ == "__main__":
    sys.exit(main())
