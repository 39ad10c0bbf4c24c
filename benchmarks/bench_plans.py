"""Time on the host what one of many ranks does for each pack, and the command `advise`; needs no GPU.

    python benchmarks/bench_plans.py

Packs are of real documents, 1,048,576 tokens over all ranks, with `balanced` rows and a causal mask. Times are of one
CPU core, without the time of other processes: the least of some runs. The agreement is that of a plan, without the
messages between ranks. Bytes are those of the rank's own transfers and of the runs of all ranks. Rows go to
benchmarks/results/plans.csv, and the table to docs/several_gpus.md.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence

from pages import with_block, write
from record import RESULTS, Row, add_options, save
from scale import PAGE, RANKS, SHAPE, TOKENS
from tables import number, table
from workloads import document_pack

from thdattn.balance import balanced_runs
from thdattn.cli.record import now
from thdattn.comm.agreement import settle
from thdattn.costs.model import compared
from thdattn.packing import PackedBatch
from thdattn.plan.key_transfers import NeededRows, Routes, needed_rows
from thdattn.sharding import Sharding

CAUSAL = (-1, 0)
COLUMNS = {"layout_ms": "layout, ms", "transfers_ms": "transfers, ms", "agreement_ms": "agreement, ms",
           "kib": "transfers, KiB", "advise_s": "`advise`, s"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "plans", repeats=5)
    args = parser.parse_args()
    lengths = document_pack(0, TOKENS)
    about = {"date": now(), "cpu": processor(), "command": "python benchmarks/bench_plans.py"}
    rows = [about | measured(lengths, ranks, args.repeats) for ranks in RANKS]
    rows = save(args.out or RESULTS / "plans.csv", rows, ("ranks",))
    print(plans(rows))
    if args.out is None:
        write(PAGE, with_block(PAGE.read_text(), "plans", plans(rows)))
    return 0


def processor() -> str:
    """Return the name of this machine's processor, where Linux tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def measured(lengths: Sequence[int], ranks: int, repeats: int) -> Row:
    """Return the row of one number of ranks."""
    layout, transfers, agreement = map(min, zip(*(plan_times(lengths, ranks) for _ in range(repeats)), strict=True))
    return {
        "ranks": str(ranks), "tokens": str(sum(lengths)), "documents": str(len(lengths)),
        "layout_ms": f"{1e3 * layout:.2f}", "transfers_ms": f"{1e3 * transfers:.2f}",
        "agreement_ms": f"{1e3 * agreement:.3f}", "kib": f"{held_bytes(lengths, ranks) / 1024:.1f}",
        "advise_s": f"{seconds(lambda: compared(lengths, ranks, SHAPE)):.2f}",
    }


def plan_times(lengths: Sequence[int], ranks: int) -> tuple[float, float, float]:
    """Return the seconds of the layout, of the transfers of the rank in the middle, and of the agreement."""
    batch = PackedBatch.from_lengths(lengths)  # of which nothing is cached

    def transfers() -> None:
        needed = transfers_of(batch, ranks)
        Routes.of(needed, ranks // 2)
        needed.key_side(ranks // 2)

    layout, routes = seconds(lambda: balanced_runs(batch, ranks)), seconds(transfers)
    return layout, routes, seconds(lambda: settle(lambda mine: [mine] * ranks, "the plan", batch.described(), "", ""))


def transfers_of(batch: PackedBatch, ranks: int) -> NeededRows:
    return needed_rows(Sharding(batch, ranks, "balanced"), CAUSAL)


def held_bytes(lengths: Sequence[int], ranks: int) -> int:
    """Return the bytes of the arrays on the host from which the rank in the middle makes its plan."""
    found, rank = transfers_of(PackedBatch.from_lengths(lengths), ranks), ranks // 2
    routes = Routes.of(found, rank)
    pieces = found.key_side(rank).pieces
    arrays = [routes.sent, routes.received, found.sizes, found.runs, found.owned, found.sends(rank),
              found.receives(rank), pieces.begin, pieces.value]
    return sum(x.nbytes for x in arrays)


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of this process's CPU time that a call takes."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def plans(rows: Sequence[Row]) -> str:
    """Return the table of all rows."""
    return table(["ranks", *COLUMNS.values()],
                 [[f"{int(row['ranks']):,}", *(number(float(row[name]), 2) for name in COLUMNS)] for row in rows])


if __name__ == "__main__":
    raise SystemExit(main())
