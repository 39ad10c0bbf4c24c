"""What no method can do, or not on all ranks, is refused on every rank."""

from __future__ import annotations

import re

import numpy as np
import pytest

import thdattn
from thdattn import PackedBatch, Sharding


def grid(comm, inner):
    return comm.split(comm.rank // inner), comm.split(comm.rank % inner)


def layer_on(comm, kind="all_gather", heads=(8, 4), **options):
    arguments = {"num_heads": heads[0], "head_dim": 8, "num_kv_heads": heads[1], "dtype": "float32",
                 "cp_comm_type": kind, "engine": "reference"}
    return thdattn.CPAttention(comm, **{**arguments, **options})


BATCH = PackedBatch.from_lengths([64, 16], 16)


@pytest.mark.parametrize(("make", "message"), [
    (lambda c: layer_on(c, "a2a", (6, 6)), "num_heads is 6 and num_kv_heads 6, wanted heads that can be spread over "
     "the 4 ranks of the all-to-all, which works for 1, 2, 3, 6 ranks; use so many, or another cp_comm_type"),
    (lambda c: layer_on(c, "a2a", (12, 6)), "num_heads is 12 and num_kv_heads 6, wanted heads that can be spread over "
     "the 4 ranks of the all-to-all, which works for 1, 2, 3, 6, 12 ranks"),
    (lambda c: layer_on(grid(c, 2), "a2a+all_gather", (9, 3)), "num_heads is 9 and num_kv_heads 3, wanted heads that "
     "can be spread over the 2 ranks of the all-to-all, which works for 1, 3, 9 ranks"),
    (lambda c: layer_on(grid(c, 2), "a2a+all_gather", (8, 1)), "num_kv_heads is 1 and comm has 2 ranks in its inner "
     "groups, wanted a divisor of the kv heads with two levels"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p", (8, 1)), "num_kv_heads is 1 and comm has 2 ranks in its inner groups"),
    (lambda c: layer_on(c, "a2a+p2p"), "cp_comm_type is 'a2a+p2p' and comm has one level, wanted (inner, outer); pass"),
    (lambda c: layer_on(grid(c, 2), "a2a"), "comm has two levels and cp_comm_type is 'a2a', wanted one of two levels"),
    (lambda c: layer_on(grid(c, 2), "p2p"), "comm has two levels and cp_comm_type is 'p2p', wanted one of two levels"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, "balanced"), "sharding is 'balanced' and cp_comm_type 'a2a', wanted "
     "'contiguous' or 'dual_chunk' with that"),
    (lambda c: layer_on(c, "p2p").plan(BATCH, "balanced"), "sharding is 'balanced' and cp_comm_type 'p2p', wanted "
     "'dual_chunk' or 'contiguous' with that"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, "balanced"), "sharding is 'balanced' and cp_comm_type "
     "'a2a+p2p', wanted 'dual_chunk' or 'contiguous' with that"),
    (lambda c: layer_on(c).plan(BATCH, Sharding(BATCH, 4, inner=2)), "sharding has inner 2, wanted 1, the ranks among "
     "which cp_comm_type 'all_gather' exchanges heads; make it with Sharding(batch, 4, 'dual_chunk', inner=1)"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, Sharding(BATCH, 4, inner=2)), "sharding has inner 2, wanted 4, the ranks "
     "among which cp_comm_type 'a2a' exchanges heads"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, Sharding(BATCH, 4)), "sharding has inner 1, wanted 2, the "
     "ranks among which cp_comm_type 'a2a+p2p' exchanges heads"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, Sharding(BATCH, 4, inner=4)), "sharding has inner 4, wanted "
     "2, the ranks among which"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, Sharding(BATCH, 2)), "sharding has cp_size 2, wanted 4"),
    (lambda c: layer_on(grid(c, 2), "a2a+all_gather").plan(PackedBatch([0, 6])), "sequence 0 has padded length 6, "
     "wanted a multiple of 2*cp_size/inner = 4 for dual_chunk"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, key_batch=BATCH), "key_batch was passed for 4 ranks, wanted one"),
    (lambda c: layer_on(c, "ring"), "cp_comm_type is 'ring', wanted"),
])  # fmt: skip
def test_what_cannot_work_is_refused_on_every_rank(make, message):
    def program(comm):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(comm)
        comm.barrier()

    thdattn.comm.run_local(4, program, timeout=20)


@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("p2p", "dual_chunk"),
                                                ("all_gather", "balanced")])  # fmt: skip
def test_keys_that_do_not_travel_alone_are_not_gathered(kind, sharding):
    def program(comm):
        plain, layer = layer_on(comm), layer_on(comm, kind)
        plan = layer.plan(BATCH, sharding)
        q, k = (np.ones((plan.local_rows, heads, 8), np.float32) for heads in (8, 4))
        wanted = "wanted 'all_gather' without 'balanced', as other methods send nothing before they have q"
        with pytest.raises(ValueError, match=f"gather was called with cp_comm_type '{kind}' .*, {wanted}"):
            layer.gather(k, k, plan)
        if kind == "p2p":
            keys = plain.gather(k, k, plan)
            with pytest.raises(ValueError, match=f"keys were passed with cp_comm_type '{kind}' .*, {wanted}"):
                layer.forward(q, k, k, plan, keys=keys)

    thdattn.comm.run_local(4, program, timeout=20)


# Options of which rank 3 has the second value.
OPTIONS = {
    "cp_comm_type": ("all_gather", "p2p"), "window": ((4, 0), (5, 0)), "causal": (True, False), "num_heads": (8, 4),
    "num_kv_heads": (4, 8), "head_dim": (8, 9), "v_head_dim": (8, 9), "softmax_scale": (1.0, 2.0),
    "dtype": ("float32", "float16"), "head_groups": (1, 2), "keep_keys": (True, False), "softcap": (0.0, 2.0),
    "sinks": (False, True),
}  # fmt: skip
DIFFERING = {
    **{name: (lambda comm, odd, name=name, values=values: layer_on(comm, **{name: values[odd]}).plan(BATCH))
       for name, values in OPTIONS.items()},
    "lengths": lambda comm, odd: layer_on(comm).plan(PackedBatch.from_lengths([64, 16 - odd], 16)),
    "padding": lambda comm, odd: layer_on(comm).plan(PackedBatch([0, 8], [0, 8 + odd * 8])),
    "rows": lambda comm, odd: layer_on(comm).plan(PackedBatch([0, 8], total_rows=16 + odd)),
    "sharding": lambda comm, odd: layer_on(comm).plan(BATCH, "balanced" if odd else "dual_chunk"),
    "all-to-all": lambda comm, odd: layer_on(comm, "a2a" if odd else "all_gather").plan(BATCH, "contiguous"),
    "sharding of heads": lambda comm, odd: layer_on(comm, "a2a").plan(BATCH, "dual_chunk" if odd else None),
    "window of heads": lambda comm, odd: layer_on(comm, "a2a", window=(3 + odd, 0)).plan(BATCH),
    "balanced lengths": lambda comm, odd: layer_on(comm).plan(
        PackedBatch.from_lengths([64 - odd, 16], 16), "balanced"),
    "lengths of a ring": lambda comm, odd: layer_on(comm, "p2p").plan(PackedBatch.from_lengths([64, 16 - odd], 16)),
    "levels": lambda comm, odd: layer_on(grid(comm, 2), "a2a+p2p" if odd else "a2a+all_gather").plan(BATCH),
    "rows of levels": lambda comm, odd: layer_on(grid(comm, 2), "a2a+all_gather").plan(
        BATCH, "contiguous" if odd else "dual_chunk"),
}  # fmt: skip
FIELDS = {
    "lengths": "cu_seqlens[2]", "padding": "total_rows", "rows": "total_rows", "causal": "window",
    "all-to-all": "cp_comm_type", "sharding of heads": "sharding", "window of heads": "window",
    "balanced lengths": "cu_seqlens[1]", "lengths of a ring": "cu_seqlens[2]", "levels": "cp_comm_type",
    "rows of levels": "sharding",
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERING)
def test_what_differs_on_one_rank_raises_on_every_rank_and_names_it(what):
    wanted = f"{re.escape(FIELDS.get(what, what))} is .* " + r"\(ranks 0, 1, 2\), .* \(rank 3\)"

    def program(comm):
        with pytest.raises(ValueError, match=f"^the plan is not the same on all ranks: (.* )?{wanted}"):
            DIFFERING[what](comm, int(comm.rank == 3))
        comm.barrier()

    thdattn.comm.run_local(4, program, timeout=20)
