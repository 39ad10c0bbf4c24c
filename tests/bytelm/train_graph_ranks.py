"""Training with every kind of CUDA graphs against training without, bit for bit, on all ranks of a launcher.

    train_graph_ranks.py FOLDER CP KEEP METHOD SIZE

CP ranks share each micro-batch; KEEP is 1 if forwards keep what has travelled for the backward, else 0; METHOD is a
cp_comm_type, or one with its sharding behind a colon; SIZE is the model's. Two ranks at most: of more, NCCL may add in
another order where a graph has its buffers registered.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / folder)
                for folder in ("tests/bytelm", "examples/bytelm"))

import runs
from runs import way_id, ways_of
from sizes import SIZES

import thdattn
from thdattn.methods.select import SHARDINGS


def trainer(**graphs):
    made = runs.trainer(comm, "cuda", cp_size=cp_size, method=method, config=config, **graphs)
    for attention in made.model.attentions:
        attention.keep_keys = keep_keys
    return made


with thdattn.comm.init("nccl") as comm:
    cp_size, keep_keys = int(sys.argv[2]), sys.argv[3] == "1"
    kind, _, sharding = sys.argv[4].partition(":")
    method = runs.Method(kind, sharding or SHARDINGS[kind], cp_size if "+" in kind else None)
    config = SIZES[sys.argv[5]]
    batches = runs.batches(Path(sys.argv[1]), 60, 512, cp_size, method.sharding)
    room = max(batch.batch.num_seqs for batch in batches) - 1
    fits, too_large = (next(batch for batch in batches if (batch.batch.num_seqs > room) == wanted)
                       for wanted in (False, True))
    held_back = [fits, too_large, *batches[2:5]]  # fits one of two groups; and five are not shared evenly
    expected = runs.run(trainer(), batches, held_back, 2, 10)
    for way in ways_of(config):
        made = trainer(max_packed_seqs=room, **way)
        found = runs.run(made, batches, held_back, 2, 10)
        assert 0 < found.overflows[-1] < 15, found.overflows
        assert found.num_captured > 0, way
        same = (found.numbers, found.validations, found.weights) == (
            expected.numbers, expected.validations, expected.weights)
        assert same, f"{way_id(way)}: {found.numbers[-1]}, wanted {expected.numbers[-1]}"
        if comm.rank == 0:
            print(f"{way_id(way)}: bitwise the same", flush=True)
        if way["impl"] == "local":
            made.graphs.close()  # the others end with the comm
