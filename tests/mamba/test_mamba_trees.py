"""A mixer over prefix trees: what the oracle gives for the unrolled paths, one by one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cases import to_host
from mixer_cases import (
    BFLOAT16,
    FIELDS,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    GPU_SIZES,
    SIZES,
    Case,
    assert_equal,
    assert_same_bits,
    check_gradients,
    random_inputs,
    run,
    step,
    truth,
)
from tree_cases import LONG, MIXED, TREES, random_case, unrolled

import thdattn
from thdattn.mamba import nodes, oracle, trees
from thdattn.mamba.oracle import Norm, Sizes
from thdattn.mamba.shape import segment_rows
from thdattn.oracle import judge


def mixer_case(trees, **options):
    return Case(trees.name, (), trees=trees, **options)


def check(case, cp_size=1, **options):
    assert_equal(run(case, cp_size, FLOAT64, **options), truth(case, FLOAT64), 1e-12)


@pytest.mark.parametrize("trees", [*TREES, *map(random_case, range(8))], ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_trees_give_what_the_paths_give(cp_size, trees):
    check(mixer_case(trees), cp_size)


@pytest.mark.parametrize("trees", [*TREES, random_case(9)], ids=str)
def test_the_oracle_of_trees_is_that_of_the_paths(trees):
    case = mixer_case(trees)
    zxbcdt, weights, dout = random_inputs(case, FLOAT64)
    paths, rows = unrolled(case.batch)
    first = np.zeros((len(rows), 1), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    of_paths = oracle.packed_mixer(paths, zxbcdt[rows], weights, np.where(first, dout[rows], 0), case.sizes)
    of_trees = truth(case, FLOAT64)
    np.testing.assert_allclose(of_trees.out[rows], of_paths.out, rtol=1e-12, atol=1e-13)
    summed = np.zeros_like(of_trees.zxbcdt)
    np.add.at(summed, rows, of_paths.zxbcdt)
    np.testing.assert_allclose(of_trees.zxbcdt, summed, rtol=1e-10, atol=1e-12)
    for name in FIELDS[2:]:
        np.testing.assert_allclose(getattr(of_trees, name), getattr(of_paths, name), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", [
    {"sizes": Sizes(2, 3, 4, 1), "conv_width": 1}, {"sizes": Sizes(3, 2, 5, 3), "conv_width": 2},
    {"norm": Norm(True, 2)}, {"norm": Norm(False, 1)},
], ids=str)
@pytest.mark.parametrize("cp_size", [1, 3])
def test_sizes_and_norms(cp_size, options):
    check(mixer_case(MIXED, **options), cp_size)
    check(mixer_case(TREES[1], **options), cp_size, keep_activations=False)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("cp_size", [1, 4])
def test_low_precision_errs_as_plain_maths_does(cp_size, dtype):
    case = mixer_case(MIXED)
    made, exact, plain = run(case, cp_size, dtype), truth(case, dtype), truth(case, dtype, dtype)
    for name in ("out", "zxbcdt"):
        verdict = judge(made[name], getattr(exact, name), getattr(plain, name))
        assert verdict.good, f"{name}: {verdict}"


def test_the_attention_beside_it_has_the_same_plan():
    case = mixer_case(MIXED)
    mixer = case.mixer(thdattn.comm.init("single"), FLOAT64)
    attn = thdattn.CPAttention(thdattn.comm.init("single"), 2, SIZES.head_dim, dtype="float64", engine="reference")
    plan = attn.plan(case.batch, "contiguous")
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    out, _ = mixer.forward(zxbcdt, weights, plan)
    np.testing.assert_array_equal(out, mixer.forward(zxbcdt, weights, mixer.plan(case.batch))[0])


@pytest.mark.parametrize(("lengths", "parents", "rows", "total"), [
    ((4096, 2048, 2048), (-1, -1, -1), 2048, 8192),
    ((4096, 2045, 1), (-1, 0, 0), 1024, 7168),  # with 3 copies the last one takes a segment too
    ((64, 61, 62), (-1, 0, 0), 64, 256),
    ((0, 64), (-1, 0), 64, 64),  # nothing is above it
    ((), (), 2048, 0),
])
def test_nodes_get_whole_segments_that_are_as_long_as_pays(lengths, parents, rows, total):
    batch = thdattn.PackedBatch.from_trees(lengths, parents)
    plan = SimpleNamespace(batch=batch, local_rows=batch.total_rows, cp_rank=0)
    made = nodes.layout(plan, nodes.cut(plan, 3), 2048).batch
    assert made.total_rows == total and segment_rows(made, 2048) == rows


def test_segments_start_from_the_first_one_with_the_same_state_in_front():
    """Segments 2 and 3 follow segment 1; segments 1 and 6 follow segment 0; segment 7 begins a tree."""
    starts = trees._starts(np.array([-1, 0, 1, 1, 3, 4, 0, -1]))
    assert starts.tolist() == [[0, 0], [1, 1], [2, 1], [2, 0], [4, 0], [5, 0], [1, 0], [-1, 0]]


def test_ranks_send_states_at_open_forks_alone():
    """A prompt of rank 0 goes on in rank 1, and has children on ranks 1 and 2, one of which goes on there."""
    batch = thdattn.PackedBatch.from_trees([130, 20, 70, 80], [-1, 0, 0, 0])
    made = []
    for rank in range(3):
        plan = SimpleNamespace(batch=batch, local_rows=100, cp_rank=rank)
        pieces = nodes.cut(plan, 3)
        made.append((nodes.crossings(pieces, rank), nodes.sent(plan, pieces)))
    assert pieces.begins.tolist() == [0, 100, 130, 150, 200, 220] and pieces.ranks.tolist() == [0, 1, 1, 1, 2, 2]
    assert pieces.before.tolist() == [-1, 0, 1, 1, 3, 1]
    # In order: the exit of rank 0 with the entry of rank 1; the exit of the prompt with an entry; that of the child.
    # Both exits of rank 1 follow the exit of rank 0.
    assert made[0][0].before.tolist() == [-1, 0, 0, 2, 0, 4] and made[0][0].slots == 2
    assert [(x.exits.tolist(), x.entries.tolist()) for x, _ in made] == [([0], []), ([2, 4], [1]), ([], [3, 5])]
    assert [x.rows.tolist() for _, x in made] == [[97, 98, 99], [27, 28, 29, 97, 98, 99], []]


def test_ranks_do_not_read_their_own_part_of_a_gather(monkeypatch):
    """Peer memory leaves it as it is."""
    gather = trees.gather

    def without_own(comm, plan, name, send):
        gathered, wait = gather(comm, plan, name, send)
        gathered[comm.rank * len(send) :][: len(send)] = np.nan
        return gathered, wait

    monkeypatch.setattr(trees, "gather", without_own)
    for each in (MIXED, *map(random_case, range(3))):
        check(mixer_case(each), 3)


# --- GPUs ------------------------------------------------------------------------------------------------------------

OTHER_SIZES = [
    {"sizes": Sizes(8, 64, 64, 8)}, {"sizes": Sizes(16, 64, 128, 2), "norm": Norm(True, 2)},
    {"sizes": Sizes(8, 64, 256, 1)}, {"sizes": Sizes(8, 128, 128, 1), "norm": Norm(False, 1)},
    *({"conv_width": width} for width in (1, 2, 8)),
]
EACH = pytest.mark.parametrize("engine", ["cuda", "portable"], indirect=True)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize(("trees", "dtype", "cp_size", "options"), [
    *((trees, BFLOAT16, cp_size, {}) for trees in (*TREES, LONG, *map(random_case, range(4))) for cp_size in (1, 3)),
    *((MIXED, BFLOAT16, cp_size, options) for options in OTHER_SIZES for cp_size in (1, 2)),
    *((trees, FLOAT16, cp_size, {}) for trees in (MIXED, LONG) for cp_size in (1, 4)),
], ids=str)
def test_trees_on_gpus_err_as_plain_maths_does(engine, trees, dtype, cp_size, options):
    case = mixer_case(trees, **{"sizes": GPU_SIZES, **options})
    made = run(case, cp_size, dtype, xp=engine.xp, keep_activations=dtype == BFLOAT16)
    verdict = judge(made["out"], truth(case, dtype).out, truth(case, dtype, dtype).out)
    assert made["out"].dtype == dtype and verdict.good, verdict
    check_gradients(case, dtype, made)


@pytest.mark.gpu
@EACH
def test_replays_on_gpus_give_the_bits_of_calls(engine):
    cupy, case = engine.xp, mixer_case(LONG, sizes=GPU_SIZES)
    inputs = random_inputs(case, BFLOAT16)
    mixer = case.mixer(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        zxbcdt, dout = (cupy.asarray(x.view(np.uint16)) for x in inputs[::2])
        weights, plan = thdattn.Mamba2Weights(*map(cupy.asarray, inputs[1])), mixer.plan(case.batch)
        on_gpu = zxbcdt.view(BFLOAT16), weights, dout.view(BFLOAT16)
        step(mixer, plan, on_gpu)
        stream.synchronize()
        stream.begin_capture()
        captured, _ = step(mixer, plan, on_gpu)
        graph = stream.end_capture()
    for seed in (1, 2):
        changed = random_inputs(case, BFLOAT16, seed)
        for there, x in ((zxbcdt, changed[0]), (dout, changed[2])):
            there.set(np.where(case.valid[:, None], x, BFLOAT16.type(np.nan)).view(np.uint16), stream)
        graph.launch(stream)
        stream.synchronize()
        replayed = {field: to_host(x) for field, x in zip(FIELDS, captured, strict=True)}
        assert_same_bits(replayed, run(case, 1, BFLOAT16, (changed[0], inputs[1], changed[2]), xp=cupy))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_caches_refuse_trees():
    case = mixer_case(MIXED)
    mixer = case.mixer(thdattn.comm.init("single"), FLOAT64)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    _, saved = mixer.forward(zxbcdt, weights, mixer.plan(case.batch))
    with pytest.raises(ValueError, match="saved is of trees, wanted one path per sequence of the cache"):
        mixer.cache(case.batch.num_seqs).fill(saved)
