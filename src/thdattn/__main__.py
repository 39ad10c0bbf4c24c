"""The command line, `python -m thdattn`: what this machine has (info), whether it computes right (check, or fuzz
for some time), how to spread a pack over ranks (advise), and how many documents a CUDA graph should take (pack-stats).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import thdattn
from thdattn import fuzz
from thdattn.cli import advise, pack_stats
from thdattn.cli.check import check
from thdattn.cli.info import info


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: as after `python -m thdattn`; those of the process by default.

    Returns:
        The exit status: 0; 1 if `check` or `fuzz` found a wrong result, 2 if a command cannot use what it was given.
    """
    parser = argparse.ArgumentParser(prog="python -m thdattn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"thdattn {thdattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, GPUs, where every library came from, and what is missing")
    checker = commands.add_parser(
        "check", help="run packs and masks of every kind against float64; under mpiexec on the real ranks"
    )
    checker.add_argument("--engine", choices=("auto", "cuda", "reference"), default="auto")
    fuzz.add_arguments(commands.add_parser(
        "fuzz", help="run random packs against float64 for some time; under mpiexec on the real ranks"))
    advise.add_arguments(commands.add_parser("advise", help="what every way to spread a pack costs, and which to take"))
    pack_stats.add_arguments(
        commands.add_parser("pack-stats", help="documents per pack, and how many a CUDA graph should take")
    )
    chosen = parser.parse_args(arguments)
    if chosen.command in ("advise", "pack-stats"):
        return advise.advise(chosen) if chosen.command == "advise" else pack_stats.pack_stats(chosen)
    if chosen.command == "fuzz":
        return fuzz.fuzz(chosen)
    return info() if chosen.command == "info" else check(chosen.engine)


if __name__ == "__main__":
    sys.exit(main())
