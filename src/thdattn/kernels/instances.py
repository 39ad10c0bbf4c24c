"""Instances of kernels: C++ names with template constants. Kernels whose constants are few are listed here."""

from __future__ import annotations

from typing import NamedTuple

ELEMENT_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "float"}
REORDER_KERNELS = {to_rank_order: f"thd_reorder<{str(to_rank_order).lower()}>" for to_rank_order in (False, True)}
REDUCE_KERNELS = {dtype: f"thd_peer_reduce<{ELEMENT_TYPES[dtype]}>" for dtype in ("float16", "bfloat16")}
ROUND_KERNELS = {dtype: f"thd_attn_round<{ELEMENT_TYPES[dtype]}>" for dtype in ("float16", "bfloat16")}
GATHER_KERNEL = "thd_peer_exchange<AllGather>"
EXCHANGE_KERNELS = {size: f"thd_peer_exchange<AllToAll<{word}>>"  # by the bytes of a word
                    for size, word in ((16, "uint4"), (4, "u32"), (1, "unsigned char"))}


class Instance(NamedTuple):
    """A kernel with its template constants, as a C++ name expression, and its bytes of dynamic shared memory."""

    name: str
    shared_bytes: int = 0


class Kind(NamedTuple):
    """Variant of the forward's softmax: with soft-capped logits, with attention sinks, or both."""

    caps: bool
    sinks: bool


PLAIN = Kind(caps=False, sinks=False)


def instance(kernel: str, *constants: str | int, shared_bytes: int = 0, trees: bool = False) -> Instance:
    """Return a kernel with its constants in the order of its template. shared_bytes, if not 0, is the last of them.

    trees: the instance for packs with prefix trees, whose last argument is a struct Trees.
    """
    all_constants = (*constants, shared_bytes) if shared_bytes else constants
    written = [ELEMENT_TYPES.get(str(c), str(c).lower()) for c in all_constants] + ["Trees"] * trees
    return Instance(f"{kernel}<{', '.join(written)}>", shared_bytes)
