"""Structs that kernels take by value, as NumPy dtypes, and checks that the compiler lays them out in the same way."""

from __future__ import annotations

import numpy as np

TENSOR_MAP = np.dtype([("opaque", np.uint8, (128,))])  # a CUtensorMap
FORWARD_SIZE = np.dtype([(field, np.int32) for field in (
    "q_rows", "num_tiles", "num_heads", "group", "together", "last_heads", "row_heads")])
KV_PARTIALS = np.dtype([(field, np.uint64) for field in ("partials", "arrived")])
BACKWARD_SIZE = np.dtype([(field, np.int32) for field in (
    "q_rows", "k_rows", "stats_rows", "num_tiles", "splits", "together", "last_splits", "split_heads", "group",
    "num_kv_heads", "semaphore_rows", "row_heads")])
TREES = np.dtype([("query_ends", np.uint64), ("group_ends", np.uint64), ("group_begins", np.uint64),
                  ("num_groups", np.int32)], align=True)
PACK_FILTER = np.dtype([(field, np.uint64) for field in ("pairs", "from", "to")])
CURVES = {name: np.dtype([("reach", np.float32), ("coefficients", np.float32, terms)])
          for name, terms in (("two", 2), ("three", 3), ("five", 5))}
LOGITS = np.dtype([*((field, np.float32) for field in ("scale", "cap", "inverse_cap", "doubled")),
                   ("slopes", np.float32, 2), *CURVES.items()])
MAX_RANKS = 16  # kMaxRanks of kernels/common.cuh
OWNERS = np.dtype([("of", np.uint64, (2, MAX_RANKS)), ("places", np.uint64)])
GRADIENTS = np.dtype([*((field, np.uint64) for field in (
    "dk", "dv", "dk_accum", "dv_accum", "semaphores", "dk_rounded", "dv_rounded", "places")), ("owners", OWNERS)])
ROWS = np.dtype([("from", np.uint64, MAX_RANKS), ("own", np.uint64), ("out", np.uint64),
                 *((field, np.int32) for field in ("words", "pitch", "own_pitch"))], align=True)
CHUNKS = 4096  # kChunks of kernels/common.cuh: chunks of what a rank has for another; each is offered separately
RANK_FLAGS = np.dtype([("ready", np.uint32, 16), ("taken", np.uint32, 16), ("offered", np.uint32, CHUNKS)])
PEER_EXCHANGE = np.dtype([("theirs", np.uint64, MAX_RANKS), ("mine", np.uint64), ("counts", np.uint64),
                    *((field, np.int32) for field in ("rank", "num_ranks", "takes"))], align=True)
ALL_GATHER = np.dtype([("keys", ROWS), ("values", ROWS), ("to", np.uint64, (2, MAX_RANKS)), ("rank_order", np.uint64),
                     ("query_ranges", np.uint64), ("num_rows", np.int32)], align=True)
MAX_SLICES = 6  # kMaxSlices of kernels/peer/exchange.cu: arrays of an all-to-all
SLICE_SPEC = np.dtype([("of", np.uint64, MAX_RANKS), ("words", np.int32, MAX_RANKS), ("rows", np.int32),
                       ("pitch", np.int32)])
ALL_TO_ALL = np.dtype([("out", SLICE_SPEC, MAX_SLICES), ("in", SLICE_SPEC, MAX_SLICES), ("to", np.uint64, MAX_RANKS),
                      ("from", np.uint64, MAX_RANKS), ("num_slices", np.int32), ("num_chunks", np.int32)])
PARTIALS = np.dtype([("of", np.uint64, (2, MAX_RANKS))])
MIXER_SIZE = np.dtype([(field, np.int32) for field in (
    "rows", "offset", "heads", "head_dim", "groups", "state_dim", "segment")])
SEGMENTS = np.dtype([(field, np.int32) for field in ("first", "count", "of_block")])

# By the names of the structs in CUDA.
LAYOUTS = {
    "TensorMap": TENSOR_MAP, "ForwardSize": FORWARD_SIZE, "KvPartials": KV_PARTIALS, "BackwardSize": BACKWARD_SIZE,
    "PackFilter": PACK_FILTER, "Owners": OWNERS, "Gradients<float>": GRADIENTS, "Logits<true>": LOGITS, "Rows": ROWS,
    "Trees": TREES, "RankFlags": RANK_FLAGS, "PeerExchange": PEER_EXCHANGE, "AllGather": ALL_GATHER,
    "SliceSpec<uint4>": SLICE_SPEC, "AllToAll<uint4>": ALL_TO_ALL, "Partials": PARTIALS, "MixerSize": MIXER_SIZE,
    "Segments": SEGMENTS,
}


def checks() -> str:
    """Write a macro CHECK_<struct> for every struct, to stand after its definition in CUDA."""
    return "#pragma once\n" + "".join(_check(struct, layout) for struct, layout in LAYOUTS.items())


def _check(struct: str, layout: np.dtype[np.void]) -> str:
    assert layout.fields is not None
    wrong = "is not what structs.py has"
    asserts = [f'static_assert(sizeof({struct}) == {layout.itemsize}, "the size of {struct} {wrong}")']
    for name, (_, offset, *_) in layout.fields.items():  # NVRTC has no offsetof, but what its front end makes of it
        found = f"__INTADDR__(&(({struct}*)0)->{name})"
        asserts.append(f'static_assert({found} == {offset}, "the offset of {struct}::{name} {wrong}")')
    return f"#define CHECK_{struct.partition('<')[0]} " + "; ".join(asserts) + "\n"
