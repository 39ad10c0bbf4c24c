"""Rank 1 fails in one of the ways in which ranks fail, at one place of a program: attention under mpiexec.

mpiexec -n 3 python fault_ranks.py stop forward mpi 5

What fails is said on stderr, as is which process is which rank; stdout stays empty.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machines
import numpy as np

import thdattn
from thdattn.comm import mpi
from thdattn.comm.nccl import communicator
from thdattn.comm.nccl import transport as nccl_transport

RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])  # before MPI knows it
if "FAULT_HOSTS" in os.environ:  # each rank plays a machine
    os.environ["THDATTN_HOST"] = f"node{RANK}"
machines.play(RANK)


COMPUTE = """
extern "C" __global__ void compute(long long nanoseconds) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""


def fail(kind: str) -> None:
    """Fail on rank 1; return on the others, and where rank 1 leaves out what comes next or nothing fails."""
    if kind == "work":
        compute(9)
    if RANK != 1 or kind in ("work", "nothing"):
        return
    say("fails")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exception":
        raise ValueError("rank 1 had bad luck")
    elif kind in ("leave", "exit"):
        sys.exit(3 * (kind == "exit"))
    elif kind == "thread":
        thread = threading.Thread(target=fail, args=("exception",))
        thread.start()
        thread.join()
    elif kind == "receive":  # each of two ranks waits for the other inside MPI, where Python handles no signal
        from mpi4py import MPI

        MPI.COMM_WORLD.recv(source=0)
    elif kind == "freeze":  # with its side process, as where a machine hangs
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "absent":
        time.sleep(1000)
    elif kind in ("hold", "pause"):  # with Python's lock, as C code and compilers may
        ctypes.PyDLL(None).sleep(1000 if kind == "hold" else 4)
    elif kind == "loop":
        while True:
            pass
    elif kind == "disk":  # an uninterruptible wait, as for a disk: until a child has opened a pipe that nobody opens
        pipe = (os.POSIX_SPAWN_OPEN, 0, os.environ["FAULT_PIPE"], os.O_RDONLY, 0)
        closed = [(os.POSIX_SPAWN_CLOSE, number) for number in (1, 2)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[*closed, pipe])
    else:
        assert kind == "skip", kind


def compute(seconds: float) -> None:
    """Keep the GPU busy for so long, while the host goes on."""
    import cupy

    cupy.RawKernel(COMPUTE, "compute")((1,), (1,), (np.int64(seconds * 1e9),))


def say(what: str) -> None:
    os.write(2, f"rank {RANK} is process {os.getpid()} and {what}\n".encode())


def before(function: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def both(*arguments: Any, **named: Any) -> Any:
        action()
        return function(*arguments, **named)

    return both


def join(kind: str, place: str, backend: str, timeout: float) -> thdattn.comm.Comm:
    if place == "start":  # before MPI
        fail(kind)
    elif place == "init":  # rank 1 has joined MPI
        mpi.watch = before(mpi.watch, lambda: fail(kind))
    elif place == "nccl":  # all ranks have found their GPUs
        communicator.start = before(communicator.start, lambda: fail(kind))
    return thdattn.comm.init(backend, timeout=timeout)


class Layer:
    """One attention of a small pack, whose rank 1 fails at a place of its third step.

    "heads": before these travel; "ahead": before a gather that kernels overlap.
    """

    def __init__(self, comm: thdattn.comm.Comm, kind: str, place: str) -> None:
        self.comm, self.kind, self.place = comm, kind, "forward" if place == "heads" else place
        dtype = "bfloat16" if "cuda" in comm.devices else "float32"
        self.num_heads, method = (4, "a2a") if place == "heads" else (2, "all_gather")
        groups = None
        if "RANKS_PER_MACHINE" in os.environ:  # NCCL carries one head while the other is computed
            nccl_transport.WORTH_OVERLAPPING, groups = 0, 2
        self.attention = thdattn.CPAttention(
            comm, self.num_heads, 64, dtype=dtype, cp_comm_type=method, head_groups=groups)
        self.plan = self.attention.plan(thdattn.PackedBatch.from_lengths([70, 33, 9], 2 * comm.size))
        self.x = self.array(self.plan.local_rows)

    def array(self, rows: int) -> Any:
        if "cuda" not in self.comm.devices:
            return np.ones((rows, self.num_heads, 64), np.float32)
        import cupy

        return cupy.asarray(np.ones((rows, self.num_heads, 64), self.attention.dtype))

    def at(self, place: str, last: bool) -> bool:
        """Fail if this is the place; return whether this rank goes on with what comes next."""
        if not last or place != self.place:
            return True
        fail(self.kind)
        return not (RANK == 1 and self.kind == "skip")

    def steps(self) -> None:
        for number in range(3):
            self.step(last=number == 2)

    def step(self, last: bool) -> None:
        saved = keys = None
        if self.place == "ahead" and self.at("ahead", last):
            keys = self.attention.gather(self.x, self.x, self.plan)
        if self.at("forward", last):
            _, saved = self.attention.forward(self.x, self.x, self.x, self.plan, keys=keys)
        if self.at("backward", last) and saved is not None:
            self.attention.backward(self.x, saved)


def replay(layer: Layer) -> None:
    """Run steps in a graph, whose third replay waits on the GPU for rank 1."""
    config = thdattn.graphs.CudaGraphConfig(impl="full_iteration", warmup_steps=1)
    with thdattn.graphs.Graphs(layer.comm, config) as graphs:
        step = graphs.captured(lambda: layer.step(False), "step")
        for number in range(6):
            if layer.at("replay", number == 4):
                step()
        layer.comm.barrier()


def exchange(layer: Layer) -> None:
    """Send from each rank to the next one; the third time they wait for rank 1."""
    comm, place = layer.comm, layer.array(len(layer.x))
    sizes = np.roll(np.eye(comm.size, dtype=int), 1, axis=1) * layer.x.nbytes
    for number in range(3):
        if layer.at("exchange", number == 2):
            sends, recvs = [(layer.x, (comm.rank + 1) % comm.size)], [(place, (comm.rank - 1) % comm.size)]
            comm.exchange(sends, recvs, sizes)()


def elsewhere(layer: Layer) -> None:
    """Wait on rank 1 in a call that the others do not make."""
    if RANK == 1:
        fail("skip")
        layer.comm.agree("a number", 7)
    layer.comm.barrier()


def main(kind: str, place: str, backend: str, timeout: str) -> None:
    say("begins")
    comm = join(kind, place, backend, float(timeout))
    if place == "group":  # of ranks 1 and up; rank 0 waits for them in the end
        Layer(comm.split(int(RANK > 0)), kind, "forward").steps()
    elif place == "replay":
        replay(Layer(comm, kind, place))
    elif place == "exchange":
        exchange(Layer(comm, kind, place))
    elif place == "elsewhere":
        elsewhere(Layer(comm, kind, place))
    else:
        Layer(comm, kind, place).steps()
    comm.barrier()
    comm.close()
    say("ends well")


if __name__ == "__main__":
    main(*sys.argv[1:])
