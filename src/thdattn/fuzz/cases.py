"""Random cases of attention and of the mixer: how they are drawn, and written as one line.

A kernel's configuration, which it is compiled for, is drawn apart from the rest of a case. Packs, masks, head counts,
methods and options change from case to case. A GPU's configurations come from a list of a dozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.fuzz.lines import Line
from thdattn.methods import a2a
from thdattn.packing import PackedBatch

Random = np.random.Generator

METHODS = ("all_gather", "a2a", "p2p", "a2a+all_gather", "a2a+p2p")
SHARDINGS = {**dict.fromkeys(METHODS, ("dual_chunk", "contiguous", "balanced")), "a2a": ("contiguous", "dual_chunk")}
FLOWS = (*["plain"] * 8, *["ahead", "split"] * 2, "layers", "replay", "varlen", "varlen", "decode")
TREE_FLOWS, TREES = ("plain", "ahead", "split", "layers"), 0.2  # share of those cases whose sequences are trees
MOST_HEADS, MANY_ROWS = 12, 600  # packs of more rows have a third of those heads
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)  # around the rows of tiles
MAX_DRAWS = 1000
FINITE = 7.5  # value of finite padding


@dataclass(frozen=True)
class FuzzCase(Line):
    """One random case.

    flow: which calls are made: "plain", "ahead" (keys gathered before), "split" (start_backward), "layers" (two layers
        of a plan in flight at once), "replay" (graphs), "varlen" (varlen_attention), "decode" or "mixer".
    ranks: number of ranks.
    inner: ranks of a group where a method has two levels.
    lengths, padded: tokens and rows of every sequence; of prefix trees, the tokens of every node.
    multiple: the number that divides the rows of every sequence without `padded`, and of every tree.
    parents: parents of the nodes of prefix trees; (): sequences are no trees.
    slack: rows behind the last sequence.
    keys: lengths of the sequences' keys, for varlen; rows per call of every sequence, for decode.
    heads: (num_heads, num_kv_heads).
    dims: (head_dim, v_head_dim).
    scale: factor on head_dim**-0.5.
    keep_keys: "auto", "yes" or "no".
    head_groups: number of groups; 0 is auto.
    finite: padding holds finite numbers instead of NaN, and the plan is told so.
    again: the calls are made twice, and must give the same bits.
    mixer: (num_heads, head_dim, state_dim, num_groups, conv_width) of a mixer.
    seed: seed of the arrays' contents.
    """

    flow: str = "plain"
    ranks: int = 1
    inner: int = 1
    method: str = "all_gather"
    sharding: str = "dual_chunk"
    lengths: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    slack: int = 0
    keys: tuple[int, ...] = ()
    heads: tuple[int, ...] = (4, 2)
    dims: tuple[int, ...] = (8, 8)
    dtype: str = "bfloat16"
    causal: bool = True
    window: tuple[int, ...] = (-1, -1)
    scale: float = 1.0
    softcap: float = 0.0
    sinks: bool = False
    deterministic: bool = False
    keep_keys: str = "auto"
    head_groups: int = 0
    finite: bool = False
    max_logit: bool = False
    again: bool = False
    mixer: tuple[int, ...] = ()
    seed: int = 0
    parents: tuple[int, ...] = ()
    multiple: int = 1

    @property
    def fill(self) -> float:
        """Number that padding holds."""
        return FINITE if self.finite else np.nan

    @property
    def tokens(self) -> PackedBatch:
        """Packed batch without padding."""
        if self.parents:
            return PackedBatch.from_trees(self.lengths, self.parents)
        return PackedBatch.from_lengths(self.lengths)

    @property
    def batch(self) -> PackedBatch:
        """Packed batch, with padding and slack."""
        if self.parents:
            batch = PackedBatch.from_trees(self.lengths, self.parents, self.multiple)
        elif self.padded:
            batch = PackedBatch(offsets(self.lengths), offsets(self.padded))
        else:
            batch = PackedBatch.from_lengths(self.lengths, self.multiple)
        return batch.padded_to(batch.total_rows + self.slack)


def offsets(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return (num_seqs + 1,) int32, the cumulative sum of the lengths from 0."""
    return np.cumsum([0, *lengths], dtype=np.int32)


class Configuration(NamedTuple):
    """Configuration that kernels are compiled for: see FuzzCase.

    softcap: whether there is one; mixer: () for attention.
    """

    dims: tuple[int, ...]
    dtype: str
    softcap: bool = False
    sinks: bool = False
    deterministic: bool = False
    mixer: tuple[int, ...] = ()


# Every head dim, and every option with some head dim; few, as each takes many seconds to compile.
ON_GPUS = (
    Configuration((64, 64), "bfloat16"),
    Configuration((128, 128), "bfloat16"),
    Configuration((192, 128), "bfloat16", deterministic=True),
    Configuration((192, 192), "float16"),
    Configuration((256, 256), "bfloat16"),
    Configuration((64, 64), "float16", deterministic=True),
    Configuration((128, 128), "float16", deterministic=True),
    Configuration((128, 128), "bfloat16", softcap=True, sinks=True),
    Configuration((64, 64), "bfloat16", sinks=True),
    Configuration((256, 256), "float16", softcap=True, deterministic=True),
    Configuration((192, 128), "float16", softcap=True),
    Configuration((96, 96), "bfloat16"),
    Configuration((192, 192), "bfloat16", sinks=True, deterministic=True),
    Configuration((), "bfloat16", mixer=(8, 64, 128, 1, 4)),
    Configuration((), "float16", mixer=(8, 64, 64, 2, 3)),
)
WIDTHS = (3, 8, 8, 12, 16, 24)


def draw_configuration(engine: str, seed: int, number: int) -> Configuration:
    """Draw the configuration of a number: a GPU's is the next one of its list, whose begin the seed shifts."""
    if engine == "cuda":
        return ON_GPUS[(seed + number) % len(ON_GPUS)]
    rng = np.random.default_rng([seed, number, 1])
    dtype = rng.choice(["float64", "float32", "float16", "bfloat16"], p=[0.3, 0.2, 0.2, 0.3]).item()
    if rng.random() < 0.06:
        groups = _pick(rng, (1, 2))
        sizes = groups * _pick(rng, (1, 2)), _pick(rng, (1, 3, 8)), _pick(rng, (1, 4, 5)), groups, _pick(rng, (1, 2, 4))
        return Configuration((), dtype, mixer=sizes)
    head_dim = _pick(rng, WIDTHS)
    v_head_dim = head_dim if rng.random() < 0.7 else _pick(rng, WIDTHS)
    return Configuration((head_dim, v_head_dim), dtype, rng.random() < 0.25, rng.random() < 0.25, rng.random() < 0.4)


def draw_case(configuration: Configuration, rng: Random, ranks: int | None, on_gpu: bool) -> FuzzCase:
    """Draw one case of a configuration.

    Args:
        ranks: number of real ranks; None: the case runs on 1 to 4 simulated ones.
        on_gpu: whether it is for the CUDA engine, which promises equal bits with deterministic=True alone.
    """
    simulated = ranks is None
    ranks = _pick(rng, (1, 2, 2, 3, 4, 4)) if ranks is None else ranks
    seed = int(rng.integers(2**31))
    if configuration.mixer:
        lengths = _lengths(rng, 120)
        padded = _padded(rng, lengths, 1)
        case = FuzzCase("mixer", ranks, sharding="contiguous", lengths=lengths, padded=padded, slack=_slack(rng),
                        dtype=configuration.dtype, mixer=configuration.mixer, seed=seed)
        return _with_trees(rng, case) if lengths and rng.random() < TREES else case
    flow = _pick(rng, FLOWS)
    if flow in ("varlen", "decode"):
        if not simulated and ranks > 1:  # they are calls of one rank
            flow = "plain"
        else:
            ranks = 1
    if flow == "replay" and on_gpu:  # replays are compared by bits, and threads cannot capture
        flow, ranks = ("replay" if configuration.deterministic else "plain"), 1 if simulated else ranks
    causal, window = _mask(rng)
    if flow == "decode":
        causal, window = True, (window[0], -1)
    method, inner = _method(rng, ranks, flow)
    sharding = _pick(rng, SHARDINGS[method])
    if flow == "ahead" and sharding == "balanced":
        sharding = _pick(rng, ("dual_chunk", "contiguous"))
    lengths = _lengths(rng, 60 if flow in ("replay", "decode") else 300)
    padded = lengths if flow == "varlen" else _padded(rng, lengths, row_multiple(method, sharding, ranks, inner))
    heads = _heads(rng, method, ranks, inner, MOST_HEADS // (3 if sum(lengths) > MANY_ROWS else 1))
    case = FuzzCase(
        flow, ranks, inner, method, sharding, lengths, padded, 0 if flow == "varlen" else _slack(rng),
        _keys(rng, flow, lengths), heads, configuration.dims, configuration.dtype, causal, window,
        scale=_pick(rng, (1.0, 1.0, 0.5, 1.25)),
        softcap=_pick(rng, (5.0, 30.0, 50.0)) if configuration.softcap else 0.0,
        sinks=configuration.sinks, deterministic=configuration.deterministic,
        keep_keys=_pick(rng, ("auto", "auto", "yes", "no")),
        head_groups=_pick(rng, [0, 0, *_divisors(heads[1])]), finite=rng.random() < 0.2, max_logit=rng.random() < 0.5,
        again=rng.random() < 0.3 and (configuration.deterministic or not on_gpu), seed=seed,
    )
    return _with_trees(rng, case) if flow in TREE_FLOWS and lengths and rng.random() < TREES else case


def draw_lengths(rng: Random, multiple: int, num_seqs: int, num_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw lengths and padded lengths of at most num_seqs sequences in at most num_rows rows."""
    lengths = _lengths(rng, num_rows // 2)[:num_seqs]
    padded = _padded(rng, lengths, multiple)
    while sum(padded) > num_rows:
        lengths, padded = lengths[:-1], padded[:-1]
    return lengths, padded


def draw_parents(rng: Random, num_nodes: int) -> tuple[int, ...]:
    """Draw the parents of the nodes of prefix trees of any depth and fan; -1 for a root."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(num_nodes):
        path = path[: int(rng.integers(0, len(path) + 1))] if rng.random() < 0.7 else path
        parents.append(path[-1] if path else -1)
        path = [*path, node]
    return tuple(parents)


# ------------------------------------------------------------------------------------------------ parts of a case


def _mask(rng: Random) -> tuple[bool, tuple[int, int]]:
    """Draw (causal, window): causal, full, and windows on the left, on the right and on both sides."""
    near, far = int(rng.integers(0, 12)), int(rng.integers(0, 200))
    left, right = (near, far) if rng.random() < 0.5 else (far, near)
    kind = _pick(rng, ("causal", "causal", "full", "causal window", "left", "right", "both", "both"))
    return {
        "causal": (True, (-1, -1)), "full": (False, (-1, -1)), "causal window": (True, (left, 0)),
        "left": (False, (left, -1)), "right": (False, (-1, right)), "both": (False, (left, right)),
    }[kind]


def _method(rng: Random, ranks: int, flow: str) -> tuple[str, int]:
    """Draw a method that takes this flow on so many ranks, and the ranks of its inner groups."""
    if flow in ("varlen", "decode", "ahead"):
        return "all_gather", 1
    methods = [method for method in METHODS if ranks > 1 or "+" not in method]
    method = _pick(rng, methods)
    return method, _pick(rng, _divisors(ranks)) if "+" in method else 1


def _heads(rng: Random, method: str, ranks: int, inner: int, most: int) -> tuple[int, int]:
    """Draw (num_heads, num_kv_heads) that the method can distribute, at most `most` heads where possible."""
    exchanging = inner if "+" in method else ranks if method == "a2a" else 1
    for _ in range(MAX_DRAWS):
        kv_heads = _pick(rng, (1, 1, 2, 2, 3, 4, 6))
        heads = kv_heads * _pick(rng, (1, 1, 2, 3, 4, 8))
        if "+" in method and inner < ranks and kv_heads % inner:
            continue
        if heads <= most and not a2a.obstacle(heads, kv_heads, exchanging):
            return heads, kv_heads
    return exchanging, exchanging


def _lengths(rng: Random, usual: int) -> tuple[int, ...]:
    """Draw tokens of sequences, about `usual` at most together, and now and then ten times as many."""
    room = 10 * usual if rng.random() < 0.01 else int(rng.integers(1, usual + 1))
    kind = _pick(rng, ("few", "few", "few", "many", "one", "edges", "none"))
    if kind == "none" and rng.random() < 0.5:
        lengths: list[Any] = [0] * int(rng.integers(0, 5))
    elif kind == "many":
        lengths = rng.integers(0, 10, min(60, max(1, room // 5))).tolist()
    elif kind == "edges":
        lengths = [_pick(rng, [edge for edge in EDGES if edge <= max(room, 2)]) for _ in range(int(rng.integers(1, 4)))]
    else:
        count = 1 if kind == "one" else int(rng.integers(1, 9))
        lengths = rng.multinomial(room, rng.dirichlet(np.full(count, 0.8))).tolist()
    if rng.random() < 0.25:
        lengths.insert(int(rng.integers(0, len(lengths) + 1)), 0)
    return tuple(map(int, lengths))


def _padded(rng: Random, lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Draw rows of sequences: multiples, sometimes more than are needed."""
    most = 2 if rng.random() < 0.3 else 1
    return tuple(multiple * (-(-length // multiple) + int(rng.integers(0, most))) for length in lengths)


def _slack(rng: Random) -> int:
    return 0 if rng.random() < 0.6 else int(rng.integers(1, 90))


def _with_trees(rng: Random, case: FuzzCase) -> FuzzCase:
    """Return the case with its sequences as nodes of prefix trees."""
    parents = draw_parents(rng, len(case.lengths))
    multiple = row_multiple(case.method, case.sharding, case.ranks, case.inner) * _pick(rng, (1, 1, 3))
    return replace(case, padded=(), parents=parents, multiple=multiple, causal=True, window=(-1, -1))


def _keys(rng: Random, flow: str, lengths: Sequence[int]) -> tuple[int, ...]:
    if flow == "varlen" and rng.random() < 0.7:
        return tuple(max(0, length + int(rng.integers(-40, 41))) for length in lengths)
    return (int(rng.integers(1, 5)),) if flow == "decode" else ()


def row_multiple(method: str, sharding: str, ranks: int, inner: int) -> int:
    """Return the multiple that padded lengths must have; see Sharding.multiple."""
    groups = ranks // inner if "+" in method else ranks
    return 2 * groups if sharding == "dual_chunk" and groups > 1 else 1


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _pick(rng: Random, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]
