"""Kernels of the Mamba-2 mixer's norm compile for every architecture without spills. No GPU."""

from __future__ import annotations

from test_compile import EACH_ARCHITECTURE, EACH_STATE_DIM, compile_all, mixer_slabs

from thdattn.mamba.configs import NormTile


@EACH_ARCHITECTURE
def test_mixer_norms_fit_and_do_not_spill(arch):
    """Groups go from one head to the widest that there is."""
    tiles = [NormTile(columns, after_gate) for columns in (64, 512, 1024, 2048, 4096, 5120, 7168, 8192)
             for after_gate in (True, False)]  # fmt: skip
    made = {make(dtype) for tile in tiles for dtype in ("bfloat16", "float16")[: 1 + (tile.columns in (64, 8192))]
            for make in (tile.thd_mixer_norm, tile.thd_mixer_decode_norm, tile.thd_mixer_norm_bwd)}  # fmt: skip
    compile_all(sorted(made), arch)


@EACH_STATE_DIM
@EACH_ARCHITECTURE
def test_scans_in_front_of_a_norm_fit_and_do_not_spill(arch, state_dim):
    compile_all(sorted({slab.scan_kernel(dtype, gates=False) for slab in mixer_slabs(arch, state_dim)
                        for dtype in ("bfloat16", "float16")}), arch)  # fmt: skip
