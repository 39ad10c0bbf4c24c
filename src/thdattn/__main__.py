"""Commands of `python -m thdattn`: what this machine has, if it computes correctly, and how to spread a pack."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import thdattn
from thdattn import fuzz
from thdattn.cli import advise, pack_stats, timeline
from thdattn.cli.info import info
from thdattn.cli.options import add_engine
from thdattn.fuzz.check import check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: as after `python -m thdattn`; those of the process by default.

    Returns:
        The exit status: 0; 1 if `check` or `fuzz` found a wrong result, 2 if a command cannot use what it was given.
    """
    parser = argparse.ArgumentParser(prog="python -m thdattn", description="Packed attention with context parallelism.",
                                     epilog="COMMAND --help lists the options of a command.")
    parser.add_argument("--version", action="version", version=f"thdattn {thdattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    def command(name: str, short: str, more: str, *examples: str) -> argparse.ArgumentParser:
        lines = "".join(f"\n  python -m thdattn {name} {example}".rstrip() for example in examples)
        return commands.add_parser(name, help=short, description=f"{short[0].upper()}{short[1:]}. {more}",
                                   epilog=f"examples:{lines}" if lines else None,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)

    command("info", "print versions, GPUs, transports, and what is missing",
            "Under mpiexec it also tells how these ranks exchange keys.")
    add_engine(command("check", "compare this machine's engine with float64",
                       "It runs every kind of pack, mask and method; under mpiexec on the real ranks."))
    fuzz.add_arguments(command("fuzz", "compare random packs with float64 for some time",
                               "Under mpiexec it runs on the real ranks. It prints a line per failure, for --case.",
                               "--seconds 600 --seed 1"))
    advise.add_arguments(command("advise", "recommend how to spread a pack over ranks",
                                 "It predicts the bytes, memory and time of every method and sharding.",
                                 "--lengths 24576,8192,32x1024 --heads 32 --kv-heads 8 --ranks 8",
                                 "--data DIR --tokens 65536 --ranks 16 --gpus-per-node 8 --plot owners.png"))
    pack_stats.add_arguments(command("pack-stats", "recommend how many documents a CUDA graph should hold",
                                     "It packs your documents as training does and counts them.",
                                     "--data DIR --tokens 16384 --accumulate 16 --groups 2 --plot packs.png",
                                     "--lengths lengths.csv --tokens 16384"))
    timeline.add_arguments(command("timeline", "draw what all ranks compute and exchange in a step of attention",
                                   "Under mpiexec or srun it records the real ranks, else simulated ones.",
                                   "--output step.svg", "--method p2p --lengths 8192,16x512 --output step.png"))
    chosen = parser.parse_args(arguments)
    if chosen.command == "fuzz":
        return fuzz.fuzz(chosen)
    if chosen.command == "timeline":
        return timeline.timeline(chosen)
    if chosen.command in ("info", "check"):
        return info() if chosen.command == "info" else check(chosen.engine)
    try:
        advise.advise(chosen) if chosen.command == "advise" else pack_stats.pack_stats(chosen)
    except (ValueError, OSError) as error:
        print(f"python -m thdattn {chosen.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
