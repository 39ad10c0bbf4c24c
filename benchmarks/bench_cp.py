"""Times one attention layer over several ranks, forward and backward, beside the attention kernels alone.

    mpiexec -n 2 python -m mpi4py benchmarks/bench_cp.py --peer --plot
    mpiexec -n 2 python -m mpi4py benchmarks/bench_cp.py --as-rank-of 8 --cases bucket32k 8x1024 --head-groups 1 4

Times are those of warm calls back to back between events on the GPU, of the slowest rank; TFLOP/s are per GPU and count
visible pairs of tokens, no padding. All ways of a case take turns. A graph holds forward and backward with all
communication inside. What is beyond the attention alone is exposed communication. The host's time is from a call to its
return on an idle GPU. Memory is what the GPU lacks after warm calls, q, k, v and dout not counted, nor what other cases
and ways have left behind of peer memory.

--peer: Transformer Engine's schedule, see cp_peer.py, in the same run. --as-rank-of N: two GPUs with the rows, keys and
traffic of two ranks of N, see rank_of.py; results are meaningless then, and neither errors nor peers are measured.
Rows go to benchmarks/results/cp_GPU.csv.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import accuracy
import cp_record
import cupy
import numpy as np
import peers
import record
import timing
from cp_record import ALONE, OURS, WAYS
from rank_of import as_rank_of
from workloads import Case, cp_cases

import thdattn
from thdattn import ops
from thdattn.comm import Comm
from thdattn.graphs import CudaGraphConfig, Graphs
from thdattn.packing import rows_of_runs

ERROR_CASE = Case("4x1024", (1_024,) * 4, 32, 8)
HOST_CALLS = 20
Key = tuple[str, str, str]  # peer, direction, timing
Measured = dict[Key, record.Row]  # the columns of what was measured
Peers = dict[str, tuple[str, Callable[["Layer"], Any]]]  # name: version, what makes it


class Timed(Protocol):
    """One attention layer; backward follows the last forward."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init(transport=args.transport) as real, cupy.cuda.Stream(non_blocking=True):
        comm = as_rank_of(real, args.as_rank_of) if args.as_rank_of else real
        about = record.provenance(real.size) | {
            "ranks": str(real.size), "as_rank_of": str(comm.size), "transport": "peer" if comm.overlaps else comm.name,
        }  # fmt: skip
        path = args.out or record.results_file("cp", about["gpu"])
        rows: list[record.Row] = []
        everything: list[record.Row] = []
        with process_group() if args.peer else nullcontext():
            others = find_peers() if args.peer else {}
            for case, measure in work(real, comm, args.cases, args.head_groups):
                start = time.perf_counter()
                made = [about | row for row in rows_of(case, others, measure(case, others, args.repeats))]
                if real.rank == 0:
                    everything = record.save(path, made, cp_record.KEY)
                    print(f"{case.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
                rows += made
    if real.rank == 0:
        print(f"{cp_record.table(rows)}\n\n{cp_record.errors(rows)}")
        print(f"wrote {path}; benchmarks/readme.py writes README.md anew")
        if args.plot:
            cp_record.plot(everything, path.with_suffix(".png"))
            print(f"wrote {path.with_suffix('.png')}")
    return 0


def process_group() -> Any:
    """torch.distributed, for the peer: PyTorch and its kernels are only imported where they are asked for."""
    import cp_peer

    return cp_peer.process_group()


def find_peers() -> Peers:
    """The peer with the best kernels that every rank has."""
    import cp_peer

    kernels = cp_peer.kernels()

    def make(layer: Layer) -> cp_peer.TransformerEngine:
        return cp_peer.TransformerEngine(layer.plan, layer.inputs, kernels)

    return {f"te+{kernels.name}": (kernels.version(), make)}


def work(
    real: Comm, comm: Comm, names: Sequence[str], head_groups: Sequence[int]
) -> Iterator[tuple[Case, Callable[[Case, Peers, int], Measured]]]:
    """Cases with what is measured of them. Errors come first: they also compile and load what others' memory lacks."""
    if comm is real:
        yield ERROR_CASE, partial(errors, real)
    for name in names:
        yield cp_cases(comm.size)[name], partial(speeds, real, comm, head_groups)


# --- what is timed -----------------------------------------------------------------------------------------------


class Layer:
    """Ours, with as many groups of heads as CPAttention chooses, or as are passed.

    Attributes:
        attention, plan: of this rank, for the pack padded to what the sharding needs.
        inputs: this rank's rows.
    """

    def __init__(self, comm: Comm, case: Case, head_groups: int | None = None) -> None:
        self.attention = case.attention("cuda", comm=comm, head_groups=head_groups)
        self.batch = thdattn.PackedBatch.from_lengths(case.lengths, 2 * comm.size)
        self.plan = self.new_plan()
        self.inputs = peers.draw_inputs(case, self.plan.local_rows)

    def new_plan(self) -> thdattn.Plan:
        return self.attention.plan(self.batch)

    def forward(self) -> None:
        q, k, v, _ = self.inputs
        self.out, self.saved = self.attention.forward(q, k, v, self.plan)

    def backward(self) -> None:
        self.grads = self.attention.backward(self.inputs.dout, self.saved)

    def results(self) -> Sequence[Any]:
        """out, dq, dk, dv: this rank's rows."""
        return self.out, *self.grads

    def choices(self) -> record.Row:
        """The columns of what CPAttention has chosen."""
        keeps = self.attention._keeps(self.plan)
        return {"head_groups": str(self.attention._groups(self.plan)), "keep_keys": "yes" if keeps else "no"}


class Alone:
    """The attention kernels of a layer, on keys and values of all ranks in sequence order that are there already."""

    def __init__(self, layer: Layer) -> None:
        _, k, v, _ = layer.inputs
        self._layer, self._scale = layer, layer.attention.softmax_scale
        shapes = ((layer.plan.key_rows, *x.shape[1:]) for x in (k, v))
        self._keys, self._values = (peers.normal(shape, seed) for seed, shape in enumerate(shapes, 1))
        self._sum_dtype = np.dtype(np.float32) if layer.plan.cp_size > 1 else k.dtype

    def forward(self) -> None:
        layer = self._layer
        self._out, self._lse, _ = ops.attn_fwd(
            layer.inputs.q, self._keys, self._values, layer.plan, self._scale, False
        )

    def backward(self) -> None:
        layer = self._layer
        self._grads = ops.attn_bwd(
            layer.inputs.dout, layer.inputs.q, self._keys, self._values, self._out, self._lse, layer.plan,
            self._scale, self._sum_dtype, False,
        )  # fmt: skip


def both(layer: Timed) -> None:
    layer.forward()
    layer.backward()


def errors(real: Comm, case: Case, others: Peers, _: int) -> Measured:
    """The errors of ours and the peer against float64."""
    layer = Layer(real, case)
    batch = layer.batch
    tokens = rows_of_runs(batch.cu_seqlens_padded[:-1], batch.lengths)
    whole = peers.draw_inputs(case, batch.total_rows)
    wanted = accuracy.exact(case, [x.get()[tokens] for x in whole], cupy)
    layer.inputs = peers.Inputs(*(layer.plan.shard(x) for x in whole))
    both(layer)
    found = {OURS: layer.results()}
    found |= {name: peer.on_gpu() for name, peer in made_peers(real, case, others, layer).items()}
    measured: Measured = {(name, result, record.ERRORS): {} for name in others for result in accuracy.RESULTS}
    for name, local in found.items():
        results = [layer.plan.unshard(x, real).get()[tokens] for x in local]
        for result, error in accuracy.errors(results, wanted).items():
            measured[name, result, record.ERRORS] = {"rms": f"{error.rms:.4e}", "largest": f"{error.largest:.4e}"}
    return measured


def speeds(
    real: Comm, comm: Comm, head_groups: Sequence[int], case: Case, others: Peers, rounds: int
) -> Measured:
    """All times of one case, in turns, and the memory of ours and the peer."""
    ours, memory = {}, {}
    for name, number in {OURS: None, **{cp_record.in_groups(number): number for number in head_groups}}.items():
        layer = Layer(comm, case, number)
        free = free_memory()
        both(layer)
        ours[name], memory[name] = layer, taken(real, layer, free)
    free = free_memory()
    made = made_peers(real, case, others, ours[OURS])
    memory |= {name: taken(real, peer, free) for name, peer in made.items()}
    ways: dict[str, Timed] = {**ours, **made, ALONE: Alone(ours[OURS])}
    both(ways[ALONE])  # a backward alone needs a forward before it
    calls: dict[Key, Callable[[], object]] = {}
    for name, way in ways.items():
        directions: tuple[Callable[[], object], ...] = way.forward, way.backward, partial(both, way)
        calls |= {(name, direction, "called"): call for direction, call in zip(WAYS, directions, strict=True)}
    host = {(name, way, "host"): calls[name, way, "called"]
            for name in memory for way in ("forward", "both")}  # fmt: skip
    host[OURS, "plan", "host"] = ours[OURS].new_plan
    with Graphs(comm, CudaGraphConfig(impl="local", warmup_steps=1)) as graphs:
        for name in (*ours, ALONE):  # of copies, whose results are the graph's and nobody else's
            calls[name, "both", "graph"] = graphs.captured(partial(both, copy(ways[name])), name)
        times = timing.race(real, calls, rounds)
    times |= {key: timing.slowest(real, timing.returned(call, HOST_CALLS)) for key, call in host.items()}
    measured: Measured = {(name, way, "called"): {} for name in others for way in WAYS}
    measured |= {key: columns(case, comm.size, key, samples, memory) for key, samples in times.items()}
    chosen = {name: layer.choices() for name, layer in ours.items()}
    return {key: found | chosen.get(key[0], {}) for key, found in measured.items()}


def made_peers(real: Comm, case: Case, others: Peers, layer: Layer) -> dict[str, Any]:
    """The peers whose results are those of ours on every rank; why others are left out is said on stderr.

    What they were to be measured by stays blank, and so replaces what an older run measured.
    """
    made = {}
    for name, (_, make) in others.items():
        failed = 0.0
        try:
            made[name] = make(layer)
            both(made[name])
            peers.check(made[name].results(), layer.results())
        except Exception as error:  # a rank that fails alone leaves the others to the time limit of torch.distributed
            failed = 1.0
            print(f"{case.name} {name}, rank {real.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        if max(timing.slowest(real, [failed])):
            made.pop(name, None)
    return made


def free_memory() -> int:
    """Of the GPU, in bytes, when the pools have given back what nobody uses."""
    peers.release_memory()
    free, _ = cupy.cuda.runtime.memGetInfo()
    return int(free)


def taken(real: Comm, layer: Timed, free: int) -> float:
    """GiB by which the free memory falls short of `free` after warm calls, of the rank that takes most."""
    peers.release_memory()  # what compiling and checking needed
    for _ in range(2):
        both(layer)
    cupy.cuda.get_current_stream().synchronize()
    left, _ = cupy.cuda.runtime.memGetInfo()
    (most,) = timing.slowest(real, [(free - left) / 2**30])
    return most


# --- what is written ---------------------------------------------------------------------------------------------


def columns(case: Case, cp_size: int, key: Key, samples: Sequence[float], memory: Mapping[str, float]) -> record.Row:
    """Of one measured time, per GPU; memory stands beside the calls that it was measured with."""
    peer, direction, how = key
    flops = {**case.flops._asdict(), "both": sum(case.flops)}.get(direction)
    row = record.timed(samples, flops / cp_size if flops and how != "host" else None)
    if (direction, how) == ("both", "called") and peer in memory:
        row["memory_gib"] = f"{memory[peer]:.2f}"
    return row


def rows_of(case: Case, others: Peers, measured: Measured) -> Iterator[record.Row]:
    blank = dict.fromkeys(("head_groups", "keep_keys", "ms", "ms_p10", "ms_p90", "samples", "tflops", "memory_gib",
                           "rms", "largest"), "")  # fmt: skip
    for (peer, direction, how), found in measured.items():
        yield {
            **case.columns,
            "peer": peer,
            "peer_version": others[peer][0] if peer in others else thdattn.__version__,
            "direction": direction,
            "timing": how,
            **(blank | found),
        }


def parse_arguments() -> argparse.Namespace:
    cases = cp_cases(1)
    names, kv_heads = list(cases), {case.kv_heads for case in cases.values()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE",
                        help=f"all by default: {' '.join(names)}")  # fmt: skip
    parser.add_argument("--transport", choices=("auto", "peer", "nccl"), default="auto", help="see thdattn.comm.init")
    parser.add_argument("--head-groups", nargs="+", type=int, default=[], metavar="N",
                        help="also time ours with so many groups of heads, in turns with the others")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="turns of every way, 3 by default")
    parser.add_argument("--peer", action="store_true", help="also time Transformer Engine's schedule")
    parser.add_argument("--as-rank-of", type=int, metavar="N", help="two GPUs behave as two ranks of N")
    parser.add_argument("--out", type=Path, help="CSV file to add to; benchmarks/results/cp_GPU.csv by default")
    parser.add_argument("--plot", action="store_true", help="also draw the CSV file's rows of this GPU, as PNG")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, wanted >= 1")
    if wrong := [number for number in args.head_groups if number < 1 or any(heads % number for heads in kv_heads)]:
        parser.error(f"--head-groups has {wrong[0]}, wanted divisors of {' and '.join(map(str, kv_heads))} kv heads")
    if args.as_rank_of is not None and args.as_rank_of < 2:
        parser.error(f"--as-rank-of is {args.as_rank_of}, wanted >= 2")
    if args.as_rank_of and args.peer:
        parser.error("--peer has no ranks to be played by others; leave it or --as-rank-of out")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'thdattn[bench]'")
    return args


if __name__ == "__main__":
    sys.exit(main())
