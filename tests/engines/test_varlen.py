"""varlen_attention: flash_attn_varlen_func's arguments and mask, and the plans that it keeps."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16, offsets, to_host
from wrong_values import DeviceOffsets, OnAGpu

import thdattn
from thdattn import oracle, varlen, varlen_attention, varlen_attention_backward

LENGTHS, KEY_LENGTHS = (37, 0, 5, 130, 1, 64), (40, 3, 2, 70, 0, 64)
HEADS, KV_HEADS = 4, 2
FIELDS = ("out", "dq", "dk", "dv")
MASKS = [(True, (-1, -1)), (False, (-1, -1)), (True, (20, 0)), (False, (7, 30)), (False, (-1, 3))]
PACKS = {"self": (LENGTHS, LENGTHS), "cross": (LENGTHS, KEY_LENGTHS)}


@pytest.fixture(autouse=True)
def nothing_kept():
    """A plan that an earlier test left would have that test's memory."""
    varlen._kept.cache_clear()


def drawn(lengths, key_lengths, dtype, dims=(8, 8), slack=0):
    """q, k, v, dout of the pack; slack rows of NaN behind the last sequence."""
    rng = np.random.default_rng(0)
    shapes = [(lengths, HEADS, dims[0]), (key_lengths, KV_HEADS, dims[0]), (key_lengths, KV_HEADS, dims[1]),
              (lengths, HEADS, dims[1])]
    packs = [rng.standard_normal((sum(n), heads, dim)) for n, heads, dim in shapes]
    return [np.concatenate([x, np.full((slack, *x.shape[1:]), np.nan)]).astype(dtype) for x in packs]


def truth(lengths, key_lengths, inputs, **options):
    batch, key_batch = (
        thdattn.PackedBatch(offsets(n), total_rows=len(x)) for n, x in ((lengths, inputs[0]), (key_lengths, inputs[1]))
    )
    return oracle.truth(batch, *inputs, key_batch=key_batch, **options)


def computed(inputs, lengths, key_lengths, **options):
    """out, dq, dk, dv by the two calls."""
    q, k, v, dout = inputs
    out, saved = varlen_attention(q, k, v, offsets(lengths), offsets(key_lengths), return_saved=True, **options)
    return out, *varlen_attention_backward(dout, saved)


# --- results ---------------------------------------------------------------------------------------------------


SINKS = np.array([0.5, -1, 3, 0])


@pytest.mark.parametrize(("pack", "causal", "window", "options"), [
    *((pack, *mask, {"softmax_scale": 0.5}) for pack in PACKS for mask in MASKS),
    *(("cross", True, (-1, -1), options) for options in ({"softcap": 1.5}, {"sinks": SINKS},
                                                         {"softcap": 2, "sinks": SINKS})),
], ids=str)
def test_float64_is_the_oracle(poisoned_host, pack, causal, window, options):
    lengths, key_lengths = PACKS[pack]
    inputs = drawn(lengths, key_lengths, np.float64, (8, 6), slack=3)
    found = computed(inputs, lengths, key_lengths, causal=causal, window_size=window, **options)
    right = truth(lengths, key_lengths, inputs, causal=causal, window=window, **options).exact
    for field, x in zip((*FIELDS, "dsinks")[: len(found)], found, strict=True):
        np.testing.assert_allclose(x, getattr(right, field), rtol=1e-10, atol=1e-12, err_msg=field)
    assert len(found) == 4 + ("sinks" in options)


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [(2, 5, ["11110", "11111"]), (5, 2, ["00", "00", "00", "10", "11"]), (3, 3, ["100", "110", "111"])],
)
def test_causal_masks_end_at_the_bottom_right_as_in_flash_attn(queries, keys, mask):
    # Every key has a value of its own and the same score, so a row of out says which keys its query saw.
    q, k, v = np.zeros((queries, 1, 4)), np.zeros((keys, 1, 4)), np.eye(keys)[:, None]
    out = varlen_attention(q, k, v, offsets((queries,)), offsets((keys,)), causal=True)
    assert ["".join(str(int(x > 0)) for x in row) for row in out[:, 0]] == mask


def test_a_causal_query_sees_nothing_ahead_whatever_the_window():
    inputs = drawn(LENGTHS, LENGTHS, np.float32)
    both = computed(inputs, LENGTHS, LENGTHS, causal=True, window_size=(9, 9))
    left = computed(inputs, LENGTHS, LENGTHS, causal=True, window_size=(9, 0))
    for field, x, y in zip(FIELDS, both, left, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=field)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_results_are_bitwise_those_of_cpattention(engine, dtype):
    *qkv, dout = map(engine.xp.asarray, drawn(LENGTHS, LENGTHS, dtype, (128, 128)))
    attn = thdattn.CPAttention(
        thdattn.comm.init("single"), HEADS, 128, KV_HEADS, dtype=dtype, deterministic=True, engine=engine.name)
    out, saved = attn.forward(*qkv, attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous"))
    wanted = out, saved.lse, *attn.backward(dout, saved)
    out, mine = varlen_attention(
        *qkv, *[offsets(LENGTHS)] * 2, causal=True, deterministic=True, return_saved=True)
    found = out, mine.saved.lse, *varlen_attention_backward(dout, mine)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype and to_host(x).tobytes() == to_host(y).tobytes()


def test_offsets_are_taken_as_flash_attn_callers_have_them():
    q, k, v, _ = drawn(LENGTHS, LENGTHS, np.float32)
    cu_seqlens = offsets(LENGTHS)
    wanted = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    longest = max(LENGTHS)
    np.testing.assert_array_equal(
        varlen_attention(q, k, v, cu_seqlens.tolist(), cu_seqlens.copy(), longest, np.int64(longest), 0.0, 8**-0.5,
                         True), wanted)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x) for x in (q, k, v, cu_seqlens, cu_seqlens)]
    np.testing.assert_array_equal(varlen_attention(*tensors, longest, longest, causal=True), wanted)
    jax = pytest.importorskip("jax")
    arrays = [jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v, cu_seqlens, cu_seqlens)]
    np.testing.assert_array_equal(varlen_attention(*arrays, longest, longest, causal=True), wanted)


def test_arguments_have_the_names_and_the_order_of_flash_attn():
    names = list(inspect.signature(varlen_attention).parameters.values())
    positional = [x.name for x in names if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale",
        "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table",
    ]


# --- plans that are kept ---------------------------------------------------------------------------------------


def plan_of(lengths=(3, 4), heads=2, dtype=np.float32, **options):
    x = np.zeros((sum(lengths), heads, 4), dtype)
    _, saved = varlen_attention(x, x, x, offsets(lengths), offsets(lengths), return_saved=True, **options)
    return saved.saved.plan


def test_a_plan_is_found_by_the_content_of_its_lengths():
    assert plan_of() is plan_of()
    others = [plan_of(**changes) for changes in (
        {"lengths": (4, 3)}, {"lengths": (7,)}, {"lengths": (3, 4, 0)}, {"heads": 1}, {"dtype": np.float64},
        {"causal": True}, {"window_size": (1, 1)})]
    assert len({id(plan) for plan in (plan_of(), *others)}) == 8


def test_lengths_that_change_in_place_are_planned_anew():
    q, k, v, _ = drawn((10,), (10,), np.float64)
    cu_seqlens = np.array([0, 4, 10], np.int32)
    varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
    cu_seqlens[1] = 7
    np.testing.assert_allclose(
        varlen_attention(q, k, v, cu_seqlens, cu_seqlens), truth((7, 3), (7, 3), (q, k, v), causal=False).exact.out)


def test_same_offsets_in_more_rows_are_another_pack():
    q, k, v, _ = drawn((10,), (10,), np.float64, slack=2)
    cu_seqlens = offsets((10,))
    assert varlen_attention(q[:10], k[:10], v[:10], cu_seqlens, cu_seqlens).shape == (10, HEADS, 8)
    out = varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
    assert out.shape == (12, HEADS, 8)
    assert (out[10:] == 0).all() and np.isfinite(out).all()


def test_old_plans_are_dropped_with_their_buffers():
    first = weakref.ref(plan_of((1,)))
    kept = weakref.ref(plan_of((2,)))
    for length in range(3, varlen.MAX_PLANS + 2):
        plan_of((length,))
        assert plan_of((2,)) is kept()
    gc.collect()
    assert first() is None
    assert varlen._kept.cache_info().currsize == varlen.MAX_PLANS


def test_threads_have_plans_of_their_own_and_right_results():
    """More lengths than are kept, so that threads drop each other's plans all the time."""
    packs = [(5 + i, 3, 9 - i % 4) for i in range(2 * varlen.MAX_PLANS)]
    inputs = {lengths: drawn(lengths, lengths, np.float64) for lengths in packs}
    wanted = {lengths: truth(lengths, lengths, x).exact for lengths, x in inputs.items()}
    plans, wrong = [], []

    def work(first):
        plans.append(plan_of())
        for i in range(3 * len(packs)):
            lengths = packs[(first * 5 + i * 3) % len(packs)]
            found = computed(inputs[lengths], lengths, lengths, causal=True)
            wrong.extend((lengths, field) for field, x in zip(FIELDS, found, strict=True)
                         if not np.allclose(x, getattr(wanted[lengths], field), rtol=1e-10, atol=1e-12))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(plan) for plan in plans}) == 4
    assert not wrong


@pytest.fixture
def gpu(monkeypatch):
    """A GPU to the cache alone: the current device and stream, and the calls that made a plan."""
    state = SimpleNamespace(device=0, stream=7, capturing=False, made=[])
    stream = SimpleNamespace(is_capturing=lambda: state.capturing)
    cuda = SimpleNamespace(
        get_current_stream=lambda: (setattr(stream, "ptr", state.stream), stream)[1],
        runtime=SimpleNamespace(getDevice=lambda: state.device))
    monkeypatch.setattr(varlen, "usable_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(varlen, "_make", lambda *call: (state.made.append(call), (object(), object()))[1])
    x = OnAGpu((7, 2, 64), np.float16)
    options = varlen.Options(None, None, None, True, (-1, -1), False, 0.0, False)
    state.plan = lambda cu_seqlens: varlen.planned(x, x, x, cu_seqlens, cu_seqlens, options)[1]
    return state


def test_a_plan_on_a_gpu_belongs_to_one_stream_of_one_gpu(gpu):
    cu_seqlens = offsets((3, 4))
    first = gpu.plan(cu_seqlens)
    assert gpu.plan(cu_seqlens) is first
    gpu.stream = 8
    second = gpu.plan(cu_seqlens)
    gpu.device = 1
    third = gpu.plan(cu_seqlens)
    assert len({id(first), id(second), id(third)}) == len(gpu.made) == 3
    gpu.device, gpu.stream = 0, 7
    assert gpu.plan(cu_seqlens) is first


def test_lengths_on_a_gpu_are_planned_anew_and_not_read(gpu):
    cu_seqlens = DeviceOffsets(3)
    assert gpu.plan(cu_seqlens) is not gpu.plan(cu_seqlens)
    assert len(gpu.made) == 2 and varlen._kept.cache_info().currsize == 0


def test_a_captured_graph_is_refused_as_it_would_outlive_the_plan(gpu):
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"captures a CUDA graph.*capture CPAttention\.forward with a plan"):
        gpu.plan(offsets((3, 4)))


# --- errors ----------------------------------------------------------------------------------------------------


def call(**changes):
    q, k, v, _ = drawn((3, 4), (2, 6), np.float32)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets((3, 4)), "cu_seqlens_k": offsets((2, 6))}
    return varlen_attention(**arguments | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout_p", 0.1), ("alibi_slopes", np.ones(4, np.float32)), ("return_attn_probs", True),
     ("block_table", np.zeros((2, 1), np.int32))],
)
def test_options_without_kernels_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*, which is not supported, wanted (0.0|None|False); "):
        call(**{name: value})


WRONG = [
    ({"q": [1.0]}, TypeError, "q is a list, wanted an array"),
    ({"q": np.zeros((2, 7, 4, 8), np.float32)}, ValueError, r"q has shape \(2, 7, 4, 8\), wanted \(tokens, heads"),
    ({"k": np.zeros((8, 2, 7), np.float32)}, ValueError, r"k has shape \(8, 2, 7\), wanted \(8, 2, 8\)"),
    ({"v": np.zeros((7, 2, 8), np.float32)}, ValueError, r"v has shape \(7, 2, 8\), wanted \(8, 2, 8\)"),
    ({"v": np.zeros((8, 2, 8))}, TypeError, "v is float64, wanted float32"),
    ({"k": np.zeros((8, 3, 8), np.float32), "v": np.zeros((8, 3, 8), np.float32)}, ValueError,
     "num_heads is 4, not a multiple of num_kv_heads = 3"),
    ({"k": OnAGpu((8, 2, 8))}, TypeError, "k is a wrong_values.OnAGpu, wanted a NumPy array"),
    ({"cu_seqlens_q": np.array([0, 3, 7])}, TypeError, "cu_seqlens_q of 7 rows is refused: cu_seqlens is int64"),
    ({"cu_seqlens_q": np.array([0, 3, 9], np.int32)}, ValueError,
     "cu_seqlens_q ends at 9, but q has 7 rows, wanted at most as many; pass"),
    ({"cu_seqlens_k": np.array([0, 5, 2], np.int32)}, ValueError, "cu_seqlens_k of 8 rows is refused: .* decreases"),
    ({"cu_seqlens_k": offsets((2, 3, 3))}, ValueError, "have 2 sequences on the host and 3 sequences on the host"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3, but cu_seqlens_q has a sequence of 4"),
    ({"max_seqlen_k": 5}, ValueError, "max_seqlen_k is 5, but cu_seqlens_k has a sequence of 6"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q is True, a bool; wanted an int; pass an int, and other options"),
    ({"causal": "no"}, TypeError, "causal is 'no', a str; wanted True or False"),
    ({"deterministic": 2}, TypeError, "deterministic is 2, a int; wanted True or False"),
    ({"window_size": (1.5, 0)}, TypeError, r"window_size\[0\] is 1.5, a float; wanted an int"),
    ({"window_size": (3, -2)}, ValueError, r"window is \(3, -2\), wanted numbers >= -1"),
    ({"softcap": -30.0}, ValueError, "softcap is -30.0, wanted a finite number > 0"),
    ({"sinks": np.zeros(3, np.float32)}, ValueError, r"sinks has shape \(3,\), wanted \(4,\)"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=[message[:30] for _, _, message in WRONG])
def test_wrong_arguments_are_named(changes, kind, message):
    call()
    with pytest.raises(kind, match=message):
        call(**changes)


def test_offsets_on_both_sides_are_refused(gpu, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match="have 2 sequences on the host and 2 sequences on a GPU"):
        call(cu_seqlens_k=DeviceOffsets(3))


def test_backward_wants_what_varlen_attention_saved():
    with pytest.raises(TypeError, match=r"saved is a ndarray, wanted the second result of varlen_attention\("):
        varlen_attention_backward(np.zeros(3), np.zeros(3))


# --- on a GPU --------------------------------------------------------------------------------------------------


def on_gpu(cupy, inputs):
    return [cupy.asarray(x) for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("where", ["host", "device"])
def test_on_a_gpu_errors_are_within_budget(cupy, poisoned_gpu, where, causal, window, dtype, pack):
    lengths, key_lengths = PACKS[pack]
    inputs = drawn(lengths, key_lengths, dtype, (64, 64), slack=3)
    q, k, v, dout = on_gpu(cupy, inputs)
    cu_seqlens = [offsets(lengths), offsets(key_lengths)]
    if where == "device":
        cu_seqlens = on_gpu(cupy, cu_seqlens)
    out, saved = varlen_attention(q, k, v, *cu_seqlens, causal=causal, window_size=window, return_saved=True)
    found = out, *varlen_attention_backward(dout, saved)
    right = truth(lengths, key_lengths, inputs, causal=causal, window=window)
    for field, x in zip(FIELDS, found, strict=True):
        verdict = right.judge(field, cupy.asnumpy(x))
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.gpu
def test_on_a_gpu_every_stream_has_its_plan(cupy):
    q, k, v, _ = on_gpu(cupy, drawn(LENGTHS, LENGTHS, BFLOAT16, (64, 64)))
    cupy.cuda.get_current_stream().synchronize()
    plans = []
    for stream in [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]:
        with stream:
            for _ in range(2):
                _, saved = varlen_attention(q, k, v, *[offsets(LENGTHS)] * 2, return_saved=True)
                plans.append(saved.saved.plan)
            stream.synchronize()
    assert plans[0] is plans[1] is not plans[2] is plans[3]


@pytest.mark.gpu
def test_on_a_gpu_a_capture_is_refused(cupy):
    q, k, v, _ = on_gpu(cupy, drawn(LENGTHS, LENGTHS, BFLOAT16, (64, 64)))
    varlen_attention(q, k, v, *[offsets(LENGTHS)] * 2)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                varlen_attention(q, k, v, *[offsets(LENGTHS)] * 2)
        finally:
            stream.end_capture()
