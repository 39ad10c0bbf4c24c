"""Every kernel compiles for every architecture without spills and fits its shared memory. No GPU."""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from launch import SOURCE
from nvrtc import compiler
from spills import SHARED_BYTES as ARCHITECTURES
from spills import kernels_of

from thdattn.jit import structs
from thdattn.kernels.configs import RESERVED_BYTES, STATIC_BYTES, TILES
from thdattn.kernels.instances import (
    EXCHANGE_KERNELS,
    GATHER_KERNEL,
    REDUCE_KERNELS,
    REORDER_KERNELS,
    ROUND_KERNELS,
    Instance,
    Kind,
    instance,
)
from thdattn.mamba.configs import (
    CHUNK_TILES,
    CHUNK_TILES_SM90,
    MIXER_KERNELS,
    MIXER_SIZES,
    SLABS,
    SLABS_SM90,
    WALKS_SM90,
    NormTile,
    chunk_tile_for,
    portable_walk,
    segments_of_block,
    slab_for,
    thd_mixer_decode,
    thd_mixer_fill,
    walk_for,
)


def others_exhaustive(names, values, usual, ids=str):
    """Parameters of which those that are not usual run exhaustively."""
    return pytest.mark.parametrize(names, [
        pytest.param(value, id=ids(value), marks=[pytest.mark.exhaustive] * (value not in usual)) for value in values])


EACH_ARCHITECTURE = others_exhaustive("arch", ARCHITECTURES, ("sm_90a",))
AMPERE_AND_HOPPER = others_exhaustive("arch", ("sm_80", "sm_90a"), ("sm_90a",))
EACH_HEAD_DIM = others_exhaustive("dims", TILES, [(128, 128)], lambda dims: f"{dims[0]}-{dims[1]}")
EACH_STATE_DIM = others_exhaustive("state_dim", MIXER_SIZES["state_dim"], MIXER_SIZES["state_dim"][:1])
OTHERS_ARE_EXHAUSTIVE = [pytest.param(False, id="some"), pytest.param(True, id="others", marks=pytest.mark.exhaustive)]
SMALL_KERNEL = "thd_plan_check"
# Every file of device code, and a kernel that it is part of.
KERNELS = sorted(kernel for file in compiler.device_files() for kernel in compiler.kernels_in(file))
FILES = {file: kernel for kernel in KERNELS for file in compiler.files(kernel) if file not in compiler.GENERATED}


def resources(log: str, lowered: str) -> tuple[int, int]:
    """Return (bytes spilled or on the stack, bytes of static shared memory) of one entry function in ptxas's log."""
    (entry,) = [part for part in log.split("Compiling entry function")[1:] if part.lstrip().startswith(f"'{lowered}'")]
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", entry)
    assert len(spilled) == 3 and "registers" in entry, f"ptxas says other things than expected: {entry}"
    shared = re.search(r"(\d+) bytes smem", entry)
    return sum(map(int, spilled)), int(shared[1]) if shared else 0


def compile_all(kernels: list[tuple[str, int]], arch: str, most_spilled: int = 0) -> None:
    """Compile kernels in parallel (NVRTC releases the interpreter), and check each against the architecture."""
    compiler.compile_kernel(SMALL_KERNEL, arch)  # the first call loads parts of NVRTC: not safe in several threads
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda kernel: compiler.compile_kernel(kernel[0], arch), kernels))
    for (name, dynamic), (cubin, lowered, log) in zip(kernels, compiled, strict=True):
        assert cubin.startswith(b"\x7fELF"), name
        assert lowered.encode() in cubin, name
        spilled, static = resources(log, lowered)
        assert spilled <= most_spilled, f"{name} for {arch} spills {spilled} bytes"
        assert "wgmma.mma_async instructions are serialized" not in log, f"{name} waits after every wgmma: {log}"
        assert static <= STATIC_BYTES, f"{name} declares {static} bytes, STATIC_BYTES is {STATIC_BYTES}"
        assert static + dynamic <= ARCHITECTURES[arch], f"{name} wants {static} + {dynamic} bytes of shared memory"


def most_spilled(arch: str, dims: tuple[int, int], caps: bool = False) -> int:
    """Return the bytes that may spill: with float32 gradients, 192/128 has a few words on the stack.

    256/256 with capped logits also has some, used once per key tile. Fewer registers would cost more.
    """
    if arch != "sm_90a":
        return 0
    return {(192, 128): 32, (256, 256): 56 * caps}.get(dims, 0)


def some_or_others(kernels: list[Instance], others: bool) -> list[Instance]:
    """Select all forwards, and backwards with every constant: each kernel's first and last instance, and those with a
    constant that both lack. Or select the others, which combine these constants in other ways."""
    by_kernel: dict[str, list[Instance]] = {}
    for kernel in kernels:
        by_kernel.setdefault(kernel.name.partition("<")[0], []).append(kernel)
    some = []
    for name, instances in by_kernel.items():
        seen: set[tuple[int, str]] = set()
        for kernel in (instances[0], instances[-1], *instances):
            constants = set(enumerate(kernel.name.split(", ")))
            if "_bwd" not in name or not constants <= seen:
                some.append(kernel)
            seen |= constants
    return [kernel for kernel in kernels if (kernel in some) != others]


@pytest.mark.parametrize("others", OTHERS_ARE_EXHAUSTIVE)
@EACH_HEAD_DIM
@others_exhaustive("arch", ARCHITECTURES, ("sm_80", "sm_90a"))
def test_attention_kernels_fit_and_do_not_spill(arch, dims, others):
    kernels = kernels_of(TILES[dims], arch, dtypes=["bfloat16"])
    compile_all(some_or_others(kernels, others), arch, most_spilled(arch, dims))


@pytest.mark.exhaustive
@EACH_HEAD_DIM
@AMPERE_AND_HOPPER
def test_float16_takes_the_registers_of_bfloat16(arch, dims):
    """Results in 16 bits are used most; one GPU of each kind is enough."""
    kernels = [*kernels_of(TILES[dims], arch, dtypes=["float16"]), TILES[dims].decode.kernel(dims, "float16")]
    compile_all([kernel for kernel in kernels if "float" not in kernel.name], arch)


@pytest.mark.parametrize("others", OTHERS_ARE_EXHAUSTIVE)
@EACH_HEAD_DIM
@AMPERE_AND_HOPPER
def test_kernels_for_capped_logits_fit_and_do_not_spill(arch, dims, others):
    kernels = kernels_of(TILES[dims], arch, caps=True, dtypes=["bfloat16"])
    compile_all(some_or_others(kernels, others), arch, most_spilled(arch, dims, caps=True))


@EACH_HEAD_DIM
@EACH_ARCHITECTURE
def test_decode_kernels_fit_and_do_not_spill(arch, dims):
    kinds = [Kind(caps, sinks) for caps in (False, True) for sinks in (False, True)][: 4 if arch == "sm_80" else 1]
    compile_all([TILES[dims].decode.kernel(dims, "bfloat16", kind) for kind in kinds], arch)


def mixer_slabs(arch, state_dim):
    """Return the slabs that a GPU may choose."""
    return {slab_for(state_dim, columns, ARCHITECTURES[arch], arch == "sm_90a") for columns in (64, 128)}


@EACH_STATE_DIM
@EACH_ARCHITECTURE
def test_mixer_kernels_of_a_state_fit_and_do_not_spill(arch, state_dim):
    usual = arch in ("sm_80", "sm_90a")
    kernels = {make(dtype) for slab in mixer_slabs(arch, state_dim) for make in (slab.states_kernel, slab.scan_kernel)
               for dtype in ("bfloat16", "float16")[: 1 + usual]}
    compile_all(sorted(kernels), arch)


@others_exhaustive("state_dim", sorted({slab.state_dim for slab in SLABS_SM90}), [64])
def test_mixer_kernels_that_convolve_fit_and_do_not_spill(state_dim):
    slabs = [slab for slab in SLABS_SM90 if slab.state_dim == state_dim]
    widths = [width for width in MIXER_SIZES["conv_width"] if slabs[0].convolves(width)]
    kernels = {slab.conv_states_kernel("bfloat16", width) for slab in slabs for width in widths}
    compile_all(sorted(kernels), "sm_90a")


@EACH_ARCHITECTURE
def test_other_mixer_kernels_fit_and_do_not_spill(arch):
    of_widths = [instance("thd_mixer_conv", "bfloat16", width) for width in MIXER_SIZES["conv_width"]]
    float16 = instance("thd_mixer_conv", "float16", 4)
    # A compiler that shares registers out otherwise leaves the widest a few words on the stack.
    spilled = 32 if arch == "sm_100" else 0
    compile_all([*of_widths, float16, *((name, 0) for name in MIXER_KERNELS)], arch, spilled)


def of_gradients(walk):
    """Return the constructor of the kernel of gradients of states."""
    return walk.gate_kernel if walk.by_boxes else walk.thd_ssd_dstates


def mixer_walks(arch, state_dim, dtype):
    """Yield the kernels of the backward's walks that a GPU may choose."""
    sizes = [(dim, columns) for dim in MIXER_SIZES["head_dim"] for columns in (64, 128) if columns % dim == 0]
    tiles = [(tile, columns) for dim, columns in sizes if (tile := mixer_tile(arch, dim, state_dim))]
    walks = {walk_for(tile, columns, ARCHITECTURES[arch]) for tile, columns in tiles}
    for walk in sorted(walks, key=repr):
        yield of_gradients(walk)(dtype)
        if walk.by_boxes:  # behind a norm
            yield portable_walk(64, state_dim, walk.columns, ARCHITECTURES[arch]).thd_ssd_dstates(dtype)
        yield from (walk.thd_ssd_chunk_states(dtype, back) for back in (False, True))


def mixer_tile(arch, head_dim, state_dim):
    """Return the backward's tile, or None if the GPU has too little shared memory."""
    try:
        return chunk_tile_for(head_dim, state_dim, ARCHITECTURES[arch], arch == "sm_90a")
    except ValueError:
        return None


@EACH_STATE_DIM
@EACH_ARCHITECTURE
def test_mixer_walks_fit_and_do_not_spill(arch, state_dim):
    compile_all(list(mixer_walks(arch, state_dim, "bfloat16")), arch)


@pytest.mark.parametrize("others", OTHERS_ARE_EXHAUSTIVE)
@EACH_ARCHITECTURE
def test_other_mixer_backward_kernels_fit_and_do_not_spill(arch, others):
    widths = [width for width in MIXER_SIZES["conv_width"] if (width != 4) == others]
    convs = [instance("thd_mixer_conv_bwd", "bfloat16", width) for width in widths]
    convs.append(instance("thd_mixer_conv_bwd", "float16", 4))
    names = "thd_mixer_gate_bwd", "thd_mixer_add_halos", "thd_mixer_clear_dt", "thd_mixer_add_copies"
    of_dtypes = [instance(name, dtype) for name in names for dtype in ("bfloat16", "float16")]
    compile_all([*convs, *of_dtypes, ("thd_mixer_sum", 0)], arch)


@pytest.mark.parametrize("others", OTHERS_ARE_EXHAUSTIVE)
@EACH_ARCHITECTURE
def test_mixer_gradients_of_chunks_fit(arch, others):
    """They keep three sums of a chunk in registers. Some are on the stack, which costs less than fewer warps."""
    of_hopper = {(tile.head_dim, tile.state_dim) for tile in CHUNK_TILES_SM90 if arch == "sm_90a"}
    tiles = [tile for tile in CHUNK_TILES if (tile.head_dim, tile.state_dim) not in of_hopper]
    kernels = [tile.thd_ssd_bwd("bfloat16") for tile in (tiles[1:] if others else tiles[:1])]
    compile_all([kernel for kernel in kernels if kernel.shared_bytes <= ARCHITECTURES[arch]], arch, most_spilled=4096)


def test_mixer_gradients_of_chunks_on_hopper_fit_and_do_not_spill():
    compile_all([tile.thd_ssd_bwd(dtype) for tile in CHUNK_TILES_SM90 for dtype in ("bfloat16", "float16")], "sm_90a")


@pytest.mark.parametrize("sizes", [*itertools.product(MIXER_SIZES["head_dim"], MIXER_SIZES["state_dim"])], ids=str)
def test_mixer_gradients_of_chunks_take_the_first_choice_that_fits(sizes):
    tiles = [tile for tile in CHUNK_TILES if (tile.head_dim, tile.state_dim) == sizes]
    needs = [tile.thd_ssd_bwd("float16").shared_bytes for tile in tiles]
    assert needs == sorted(needs, reverse=True), "choices are listed from large to small"
    for tile, need in zip(tiles, needs, strict=True):
        assert chunk_tile_for(*sizes, need) == tile
    assert chunk_tile_for(*sizes, ARCHITECTURES["sm_80"]) in tiles
    on_hopper = [tile for tile in CHUNK_TILES_SM90 if (tile.head_dim, tile.state_dim) == sizes]
    assert chunk_tile_for(*sizes, ARCHITECTURES["sm_90a"], sm90=True) == [*on_hopper, *tiles][0]
    with pytest.raises(ValueError, match=f"shared memory per thread block, wanted {needs[-1]} for the backward"):
        chunk_tile_for(*sizes, needs[-1] - 1)


@pytest.mark.parametrize("columns", [64, 128, 192])
def test_states_are_made_as_tiles_read_them(columns):
    """Hopper's tiles read boxes of whole columns; others read the same on every GPU."""
    for tile in (*CHUNK_TILES, *CHUNK_TILES_SM90):
        if columns % tile.head_dim == 0:
            walk = walk_for(tile, columns, ARCHITECTURES["sm_90a"])
            assert (walk.by_boxes, walk.state_dim) == (tile.by_boxes, tile.state_dim) and columns % walk.columns == 0


def test_every_slab_is_the_first_choice_somewhere():
    chosen = {slab for arch in ARCHITECTURES for state_dim in MIXER_SIZES["state_dim"]
              for slab in mixer_slabs(arch, state_dim)}
    assert chosen == {*SLABS, *SLABS_SM90}


@pytest.mark.parametrize(("segments", "slabs", "of_block"), [(8, 32, 2), (64, 32, 16), (4, 32, 1), (1, 32, 1)])
def test_thread_blocks_of_a_scan_walk_over_as_many_segments_as_one_wave_needs(segments, slabs, of_block):
    assert segments_of_block(segments, slabs, multiprocessors=132) == of_block


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_a_thread_block_of_a_small_gpu_walks_over_all_segments(segments):
    assert segments_of_block(segments, slabs=4, multiprocessors=1) == segments


@EACH_ARCHITECTURE
def test_decode_kernels_of_the_mixer_fit_and_do_not_spill(arch):
    kernels = [kernel for dtype in ("float16", "bfloat16") for width in MIXER_SIZES["state_dim"] for kernel in (
        thd_mixer_decode(dtype, width), thd_mixer_decode(dtype, width, gates=False), thd_mixer_fill(dtype, width),
    )]
    of_widths = [instance("thd_mixer_decode_conv", "float16", width) for width in MIXER_SIZES["conv_width"]]
    compile_all([*kernels, *of_widths, instance("thd_mixer_fill_rows", "float16")], arch)


@EACH_ARCHITECTURE
def test_mixer_norms_fit_and_do_not_spill(arch):
    """Groups go from one head to the widest that there is."""
    tiles = [NormTile(columns, after_gate) for columns in (64, 512, 1024, 2048, 4096, 5120, 7168, 8192)
             for after_gate in (True, False)]
    made = {make(dtype) for tile in tiles for dtype in ("bfloat16", "float16")[: 1 + (tile.columns in (64, 8192))]
            for make in (tile.thd_mixer_norm, tile.thd_mixer_decode_norm, tile.thd_mixer_norm_bwd)}
    compile_all(sorted(made), arch)


@EACH_STATE_DIM
@EACH_ARCHITECTURE
def test_scans_in_front_of_a_norm_fit_and_do_not_spill(arch, state_dim):
    compile_all(sorted({slab.scan_kernel(dtype, gates=False) for slab in mixer_slabs(arch, state_dim)
                        for dtype in ("bfloat16", "float16")}), arch)


@EACH_ARCHITECTURE
def test_reorder_and_plan_kernels_fit_and_do_not_spill(arch):
    names = (GATHER_KERNEL, *EXCHANGE_KERNELS.values(), *REORDER_KERNELS.values(), *REDUCE_KERNELS.values(),
             *ROUND_KERNELS.values(), *(name for name in KERNELS if name.startswith(("thd_plan_", "thd_cache_"))))
    # There the exchange in words of 4 bytes, as of odd shapes, leaves four of them on the stack.
    compile_all([(name, 0) for name in names], arch, 16 if arch == "sm_120" else 0)


@pytest.mark.parametrize("dims", TILES, ids=lambda dims: f"{dims[0]}-{dims[1]}")
def test_backward_is_the_first_choice_that_fits(dims):
    tiles = TILES[dims]
    needs = [b.kernel(dims, "bfloat16", "float32", True).shared_bytes + STATIC_BYTES for b in tiles.backward]
    assert needs == sorted(needs, reverse=True), "choices are listed from large to small"
    for choice, need in zip(tiles.backward, needs, strict=True):
        assert tiles.backward_for(need) == choice
    for shared_bytes in ARCHITECTURES.values():
        assert tiles.backward_for(shared_bytes) in tiles.backward
    with pytest.raises(ValueError, match=f"needs {needs[-1]}; add a choice with smaller tiles"):
        tiles.backward_for(needs[-1] - 1)


@EACH_HEAD_DIM
def test_the_portable_forward_is_the_first_whose_thread_blocks_share_a_multiprocessor(dims):
    tiles = TILES[dims]
    *choices, last = tiles.forward
    for choice in choices:
        each = choice.kernel(dims, "bfloat16", "bfloat16").shared_bytes + STATIC_BYTES + RESERVED_BYTES
        fits = choice.per_multiprocessor * each - RESERVED_BYTES
        assert tiles.forward_for(fits) == choice != tiles.forward_for(fits - 1)
    assert tiles.forward_for(ARCHITECTURES["sm_120"]) == last


@pytest.mark.parametrize(("caps", "capped_tile_n", "keys"), [(False, 32, 64), (True, 32, 32), (True, 0, 64)])
def test_capped_logits_have_as_many_keys_at_a_time_as_the_table_says(caps, capped_tile_n, keys):
    row, kind = TILES[128, 128], Kind(caps=caps, sinks=False)
    for tiles in (row.forward[0], row.forward_sm90):
        changed = replace(tiles, tile_n=64, capped_tile_n=capped_tile_n)
        assert f", 128, 128, {keys}, " in changed.kernel(row.dims, "float16", "float16", kind).name


@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_a_portable_backward_of_parts_of_fragments_is_refused(head_dim):
    """Some warps of 128/128 divide the columns of dk in four: multiples of 64 are whole fragments."""
    row = TILES[128, 128]
    if head_dim % 64 == 0:
        assert replace(row, head_dim=head_dim).head_dim == head_dim
        return
    with pytest.raises(ValueError, match=rf"head dims \({head_dim}, 128\) leaves warps parts of fragments of"):
        replace(row, head_dim=head_dim)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"stages": 3}, "count two stages"),
    ({"panel_cols": 64}, "panels must divide the columns of dq"),
    ({"in_registers": 48}, "takes all queries of a step"),
], ids=str)
def test_a_hopper_backward_that_would_leave_something_out_does_not_compile(wrong, message):
    tiles = replace(TILES[96, 96].backward_sm90, **wrong)
    kernel = tiles.kernel((96, 96), "bfloat16", "bfloat16", "bfloat16", deterministic=False)
    with pytest.raises(RuntimeError, match=f"(?s)static assertion failed .*{message}"):
        compiler.compile_kernel(kernel.name, "sm_90a")


def test_every_kernel_is_found_in_the_one_file_that_defines_it():
    assert len(set(KERNELS)) == len(KERNELS) > 50
    texts = [(compiler.FOLDER / file).read_text() for file in compiler.device_files()]
    assert len(KERNELS) == sum(text.count("__global__") for text in texts)


def test_every_kernel_has_its_name_in_python_and_every_name_is_of_a_kernel():
    texts = [path.read_text() for path in compiler.FOLDER.rglob("*.py")]
    assert {name for text in texts for name in re.findall(r'"(thd_\w+)["<]', text)} == set(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_file_comes_behind_those_that_it_includes(kernel):
    before = set()
    for file, text in compiler.files(kernel).items():
        assert before.issuperset(re.findall(r'#include "(.+)"', text))
        before.add(file)
    assert f" {kernel}(" in text


def test_every_file_of_device_code_belongs_to_a_kernel():
    files = {str(path.relative_to(compiler.FOLDER)) for path in compiler.FOLDER.rglob("*.cu*")}
    assert files == set(FILES)


def test_constants_that_do_not_compile_are_named_with_the_compilers_log():
    with pytest.raises(RuntimeError, match=r"(?s)thd_reorder<7, 7> for sm_90a: .*error.*thd_reorder"):
        compiler.compile_kernel("thd_reorder<7, 7>", "sm_90a")


def test_the_wheel_ships_every_file_of_device_code():
    project = (SOURCE.parent / "pyproject.toml").read_text()
    (patterns,) = re.findall(r"^thdattn = \[(.*)\]$", project, re.MULTILINE)
    shipped = {path for pattern in re.findall(r'"(.*?)"', patterns) for path in compiler.FOLDER.glob(pattern)}
    assert set(compiler.FOLDER.rglob("*.cu*")) <= shipped


@pytest.mark.parametrize(("file", "name"), FILES.items())
def test_an_error_names_the_file_and_the_line_that_are_wrong(file, name, edited):
    lines = (compiler.FOLDER / file).read_text().splitlines()
    wrong = max(i for i, line in enumerate(lines) if not line and lines[i + 1][0] != " ")  # between two definitions
    edited(file, lambda text: "\n".join([*lines[:wrong], "not_a_type x;", *lines[wrong + 1 :], ""]))
    with pytest.raises(RuntimeError, match=rf"{file}\({wrong + 1}\): error: .*not_a_type"):
        compiler.compile_kernel(name, "sm_90a")


# --- what Python computes for C --------------------------------------------------------------------------------


def with_tiles():
    """Return one instance of every kernel whose shared memory Python computes."""
    narrow, pair, wide = TILES[64, 64], TILES[192, 128], TILES[256, 256]
    dtypes = "float16", "float16", "float32"
    mixer = [make("float16") for slab in (SLABS[0], SLABS_SM90[0]) for make in (slab.states_kernel, slab.scan_kernel)]
    mixer += [SLABS_SM90[0].conv_states_kernel("float16", 4)]
    mixer += [tiles[0].thd_ssd_bwd("float16") for tiles in (CHUNK_TILES, CHUNK_TILES_SM90)]
    mixer += [kernel for walk in (walk_for(CHUNK_TILES[0], 64, 2**20), WALKS_SM90[0])
              for kernel in (of_gradients(walk)("float16"), walk.thd_ssd_chunk_states("float16", False))]
    return [*mixer,
            *(tiles.kernel(narrow.dims, "float16", "float32")
              for tiles in (narrow.forward[0], narrow.backward_dq, narrow.forward_sm90)),
            narrow.backward[0].kernel(narrow.dims, "float16", "float32", with_dq=True),
            *(row.backward_sm90.kernel(row.dims, *dtypes, deterministic=False) for row in (narrow, pair, wide)),
            wide.backward_sm90.dq.kernel(wide.dims, "float16", "float32")]


def test_every_kernel_that_is_launched_with_shared_memory_is_among_those_below():
    kernels = [kernel for row in TILES.values() for arch in ("sm_80", "sm_90a") for kernel in kernels_of(row, arch)]
    kernels += [make("float16") for slab in (*SLABS, *SLABS_SM90) for make in (slab.states_kernel, slab.scan_kernel)]
    kernels += [slab.conv_states_kernel("float16", 4) for slab in SLABS_SM90]
    kernels += [tile.thd_ssd_bwd("float16") for tile in (*CHUNK_TILES, *CHUNK_TILES_SM90)]
    kernels += [kernel for dim in MIXER_SIZES["state_dim"] for kernel in mixer_walks("sm_90a", dim, "float16")]
    found = {kernel.name.partition("<")[0] for kernel in kernels if kernel.shared_bytes}
    assert found == {kernel.name.partition("<")[0] for kernel in with_tiles()}


@pytest.mark.parametrize("wrong", [-16, 16])
@pytest.mark.parametrize("kernel", [*with_tiles(), thd_mixer_fill("float16", 64)],
                         ids=lambda kernel: kernel.name.partition("<")[0])
def test_wrong_bytes_of_shared_memory_do_not_compile(kernel, wrong):
    right = f", {kernel.shared_bytes}>"
    assert kernel.name.endswith(right)
    asked = kernel.shared_bytes + wrong
    with pytest.raises(RuntimeError, match=r"(?s)static assertion failed .*Python computes other bytes") as error:
        compiler.compile_kernel(kernel.name.replace(right, f", {asked}>"), "sm_90a")
    assert f"kFound={kernel.shared_bytes}, kFromPython={asked}" in str(error.value)


@pytest.mark.parametrize(("struct", "change"), [
    (struct, change) for struct in structs.LAYOUTS for change in ("a field more", "a field less", "another order")
    if struct not in ("TensorMap", "Partials") or change == "a field more"  # they have a single field
])
def test_wrong_layout_of_a_struct_does_not_compile(struct, change, monkeypatch):
    layout = structs.LAYOUTS[struct]
    fields = [(name, layout[name]) for name in layout.names]
    wrong = {"a field more": [*fields, ("more", np.int64)], "a field less": fields[:-1],
             "another order": fields[::-1]}[change]
    monkeypatch.setitem(structs.LAYOUTS, struct, np.dtype(wrong))
    compiler.forget_files()
    by_name = {kernel.name.partition("<")[0]: kernel.name for kernel in with_tiles()}
    kernels = {"ForwardSize": by_name["thd_attn_fwd_sm90"], "MixerSize": MIXER_KERNELS[0],
               "KvPartials": by_name["thd_attn_fwd_sm90"], "Rows": REORDER_KERNELS[False],
               "Segments": MIXER_KERNELS[0], "Partials": REDUCE_KERNELS["float16"],
               "SliceSpec<uint4>": EXCHANGE_KERNELS[16], "AllToAll<uint4>": EXCHANGE_KERNELS[16],
               **dict.fromkeys(("RankFlags", "PeerExchange", "AllGather"), GATHER_KERNEL)}
    try:
        with pytest.raises(RuntimeError, match=f"static assertion failed .*{struct}.* is not what structs.py has"):
            compiler.compile_kernel(kernels.get(struct, by_name["thd_attn_bwd_sm90"]), "sm_90a")
    finally:
        monkeypatch.undo()
        compiler.forget_files()


@pytest.mark.parametrize("constant", compiler.CONSTANTS)
def test_a_constant_that_python_has_otherwise_does_not_compile(constant, monkeypatch):
    """One kernel includes each file with constants."""
    value = compiler.CONSTANTS[constant]
    wrong = value + 1 if isinstance(value, int) else lambda columns: value(columns) + 8
    monkeypatch.setitem(compiler.CONSTANTS, constant, wrong)
    compiler.forget_files()
    row = TILES[64, 64]
    forward = row.forward[0].kernel(row.dims, "float16", "float16").name
    by_file = {**dict.fromkeys(("kTreeGroup", "kBehindKeys"), forward),
               **dict.fromkeys(("kSlab", "slab_of"), instance("thd_attn_count_partials_sm90", 2, 128).name),
               "kMaxSlices": GATHER_KERNEL, "kMaxSplits": row.decode.kernel(row.dims, "float16").name,
               "kPad": instance("thd_attn_delta", "float16", 64).name}
    try:
        with pytest.raises(RuntimeError, match=rf"static assertion failed .*{constant}.* is not what Python has"):
            compiler.compile_kernel(by_file.get(constant, instance("thd_attn_split_kv", 128, 128).name), "sm_90a")
    finally:
        monkeypatch.undo()
        compiler.forget_files()


def test_matrix_instructions_are_written_for_the_columns_of_the_table_alone():
    with_all = "".join(compiler.files("thd_attn_fwd_sm90").values())
    written = set(map(int, re.findall(r"struct Wgmma<bf16, (\d+)>", with_all)))
    assert written == set().union(*(tiles.wgmma_columns for tiles in TILES.values()))
