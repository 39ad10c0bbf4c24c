"""Plans of balanced rows and of the rows of one rank on the GPU, and how needed rows are moved, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BFLOAT16, SMALL, plan_with
from pairs import WINDOWS
from test_balanced import CP_SIZES, PACKS, adversarial_lengths, batch_of, random_pack
from test_gpu_plan import assert_same_plans, on_gpu

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.engines import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

STRATEGIES = ("dual_chunk", "contiguous", "balanced")
WIDTHS = [((2, 8), (2, 24)), ((3, 128), (3, 64)), ((1, 192), (1, 128))]  # (heads, width) of k and of v


def padded_for(batch, strategy, cp_size):
    """The lengths of a batch with padding that the strategy can split."""
    return PackedBatch.from_lengths(batch.lengths, 2 * cp_size) if strategy == "dual_chunk" else batch


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PACKS)
def test_device_plan_is_the_host_plan(cupy, name, strategy, cp_size):
    batch, keys_of = padded_for(PACKS[name], strategy, cp_size), (None, *range(cp_size))
    windows = WINDOWS if cp_size < 4 else WINDOWS[:2]
    for masks, tiles in ((windows, (128, 64)), ([(30, 0)], (7, 100))):
        assert_same_plans(cupy, batch, cp_size, strategy, masks, [tiles], keys_of=keys_of)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_device_plan_of_every_pack_is_the_host_plan(cupy, case):
    for cp_size in (2, 8):
        assert_same_plans(cupy, case.batch(cp_size), cp_size, "balanced", [case.window, (-1, 0)], [(128, 128)],
                          keys_of=(None, *range(cp_size)))


@pytest.mark.parametrize("seed", range(20))
def test_device_plan_of_any_pack_is_the_host_plan(cupy, seed):
    rng = np.random.default_rng(seed)
    tiles, window = (tuple(rng.integers(low, high, 2).tolist()) for low, high in ((1, 200), (-1, 40)))
    for _ in range(5):
        cp_size, strategy = int(rng.choice(CP_SIZES)), str(rng.choice(STRATEGIES))
        batch = padded_for(random_pack(rng), strategy, cp_size)
        assert_same_plans(cupy, batch, cp_size, strategy, [(-1, 0), window], [tiles], keys_of=(None, *range(cp_size)))
    large = batch_of(adversarial_lengths(rng), slack=int(rng.integers(0, 300)))
    assert_same_plans(cupy, large, 8, "balanced", [(-1, 0), (1000, 0)], [(128, 64)])


def test_plans_of_a_batch_share_rows_but_no_key_buffers(cupy):
    from thdattn.engines import cuda

    sharding = Sharding(PACKS["documents"], 2, "balanced")
    causal = plan_with(cuda, sharding, 0, (-1, 0), (64, 64)).arrays
    assert plan_with(cuda, sharding, 0, (-1, 0), (64, 64)).arrays is causal
    others = [plan_with(cuda, sharding, 0, window, (64, 64), keys_of=keys_of).arrays
              for window, keys_of in (((5, 0), None), ((-1, 0), 0), ((-1, 0), 1))]
    for other in others:
        for field in ("rows", "positions", "valid", "all_rows", "offsets"):
            assert getattr(other, field).data.ptr == getattr(causal, field).data.ptr, field
        assert other.rows_of_keys.data.ptr != causal.rows_of_keys.data.ptr
    assert others[0].returns.data.ptr != causal.returns.data.ptr
    assert others[1].key_ranges.get().tolist() != others[2].key_ranges.get().tolist()


# --- moves of rows --------------------------------------------------------------------------------------------------


def plans_of(sharding, cp_rank, window):
    from thdattn.engines import cuda

    return [plan_with(engine, sharding, cp_rank, window, (64, 64)) for engine in (reference, cuda)]


def random_rows(rng, rows, shapes, dtype):
    return [rng.standard_normal((rows, *shape)).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
@pytest.mark.parametrize("name", PACKS)
def test_needed_rows_are_packed_and_put_in_order_as_numpy_does(cupy, name, dtype):
    from thdattn.engines import cuda

    rng, sharding = np.random.default_rng(0), Sharding(PACKS[name], 3, "balanced")
    for cp_rank in range(3):
        here, there = plans_of(sharding, cp_rank, (30, 0))
        assert here.first_own == there.first_own and here.routes.table.tolist() == there.routes.table.tolist()
        for shapes in WIDTHS:
            wide = random_rows(rng, here.local_rows, [(5, width) for _, width in shapes], dtype)
            heads = shapes[0][0]
            own = [x[:, 1 : 1 + heads] for x in wide]
            own_there = [cupy.asarray(x)[:, 1 : 1 + heads] for x in wide]
            into = [np.zeros((here.routes.num_sent, *shape), dtype) for shape in shapes]
            into_there = [cupy.empty(x.shape, dtype) for x in into]
            reference.pack_rows(own, here.arrays.sends, into)
            cuda.pack_rows(own_there, there.arrays.sends, into_there)
            received = random_rows(rng, here.first_own, shapes, dtype)
            keys = reference.to_sequence_order([[x] for x in received], here, own=own)
            keys_there = cuda.to_sequence_order([[cupy.asarray(x)] for x in received], there, own=own_there)
            for x, y in zip((*into, *keys), (*into_there, *keys_there), strict=True):
                assert y.get().tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
@pytest.mark.parametrize("cp_size", [2, 3, 8, 20])
@pytest.mark.parametrize("name", PACKS)
def test_shares_of_gradients_are_added_up_as_numpy_does(cupy, name, cp_size, dtype):
    from thdattn.engines import cuda

    rng, sharding = np.random.default_rng(1), Sharding(PACKS[name], cp_size, "balanced")
    for cp_rank in (0, cp_size - 1):
        here, there = plans_of(sharding, cp_rank, (-1, 0))
        for shapes in WIDTHS:
            own = random_rows(rng, here.key_rows, shapes, np.float32)
            back = random_rows(rng, here.routes.num_sent, shapes, np.float32)
            results = [np.ones((here.local_rows, 6, width), dtype) for _, width in shapes]
            results_there = [cupy.ones(x.shape, dtype) for x in results]
            heads = slice(2, 2 + shapes[0][0])
            reference.add_partials(own, back, here, [x[:, heads] for x in results])
            cuda.add_partials([cupy.asarray(x) for x in own], [cupy.asarray(x) for x in back], there,
                           [x[:, heads] for x in results_there])
            for x, y in zip(results, results_there, strict=True):
                assert y.get().tobytes() == x.tobytes(), "other heads stay as they were"


def test_sums_of_one_table_for_all_ranks_are_what_they_were(cupy):
    from thdattn.comm.overlap.reduce import add_up
    from thdattn.jit.structs import PARTIALS

    rng = np.random.default_rng(2)
    parts = rng.standard_normal((2, 3, 50, 2, 8)).astype(np.float32)
    rows = rng.permutation(50).astype(np.int32)[:40]
    rows[::7] = -1
    on = cupy.asarray(parts)
    shares = np.zeros((), PARTIALS)
    for i in range(2):
        shares["of"][i, :3] = [on[i, rank].data.ptr for rank in range(3)]
    for order in (None, rows):
        taken = np.arange(50) if order is None else order
        results = [cupy.ones((len(taken), 2, 8), np.float16) for _ in range(2)]
        add_up(shares[()], 3, None if order is None else cupy.asarray(order), results)
        for i, result in enumerate(results):
            total = parts[i, 0] + parts[i, 1] + parts[i, 2]
            wanted = np.where((taken < 0)[:, None, None], 0, total[taken]).astype(np.float16)
            np.testing.assert_array_equal(result.get(), wanted)


def test_one_rank_has_its_rows_in_order_wherever_the_lengths_are(cupy):
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 1, 64, engine="cuda")
    batch = PACKS["documents"]
    plans = [attention.plan(lengths, "balanced") for lengths in (batch, on_gpu(cupy, batch))]
    for plan in plans:
        assert plan.rows.get().tolist() == list(range(batch.total_rows)) and plan.routes is None
