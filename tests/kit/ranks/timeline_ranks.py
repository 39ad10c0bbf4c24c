"""A rank of a recorded step on GPUs: timeline_ranks.py TRANSPORT PICTURE."""

import itertools
import sys

import cupy
import numpy as np

import thdattn


def bars(found, rank, name):
    return [row for row in found.rows if (row.rank, row.name) == (rank, name)]


def main(transport, picture):
    with thdattn.comm.init("nccl", transport=transport) as comm:
        attn = thdattn.CPAttention(comm, 16, 128, head_groups=4, keep_keys=False)
        plan = attn.plan(thdattn.PackedBatch.from_lengths([32768], multiple=2 * comm.size))
        noise = np.random.default_rng(comm.rank).standard_normal(2**20, np.float32).astype(attn.dtype)
        q, k, v = (cupy.asarray(np.resize(noise, (plan.local_rows, 16, 128))) for _ in range(3))

        def step():
            out, saved = attn.forward(q, k, v, plan)
            return out, *attn.backward(out, saved)

        for _ in range(2):
            step()
        with thdattn.timeline.record(comm) as found:
            step()
        for rank in range(comm.size):
            rows = [row for row in found.rows if row.rank == rank]
            assert all(row.begin <= row.end for row in rows)
            assert {row.lane for row in rows} == {"compute", "exchange", "sum"}
            assert len([row for row in rows if row.name.startswith("thd_attn_fwd")]) == 4
            assert len(bars(found, rank, "gather of keys")) == (6 if transport == "peer" else 8)
            kernels = sorted((row.begin, row.end) for row in rows if row.lane == "compute")
            assert all(end <= begin + 0.01 for (_, end), (begin, _) in itertools.pairwise(kernels))
        # What all ranks take part in ends nowhere before all have begun it.
        name = "thd_peer_exchange" if transport == "peer" else "gather of keys"
        for same in zip(*(bars(found, rank, name) for rank in range(comm.size)), strict=True):
            assert max(row.begin for row in same) <= min(row.end for row in same) + found.error
        assert found.error < 20, f"clocks agree within {found.error} ms"
        assert found.hidden > 0.4, str(found)
        found.save(picture)
        print(f"recorded on {transport}: {found}")


main(*sys.argv[1:])
