"""tools/spills.py: a head dim whose tile sizes would be wrong is refused with a reason. No GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nvrtc import compiler
from spills import candidate, judge_all

from thdattn.kernels import configs


@pytest.fixture(autouse=True)
def own_matrix_instructions(monkeypatch):
    """Candidates need matrix instructions of other widths, which no other test may see."""
    monkeypatch.setattr(configs, "WGMMA_COLUMNS", [*configs.WGMMA_COLUMNS])
    yield
    monkeypatch.undo()
    compiler.forget_files()


@pytest.mark.parametrize(("head_dim", "arch", "only", "reason"), [
    (80, "sm_80", "", "leaves warps parts of fragments of head_dim, v_head_dim, dq"),
    (48, "sm_90a", "fwd_sm90<bf16, bf16, false, false", "a tile must have whole slabs"),
    (112, "sm_90a", "bwd_sm90<bf16, bf16, bf16", "panels must divide the columns of dq"),
    (160, "sm_90a", "by_gradient_sm90<bf16, bf16, bf16", "tiles must have slabs of 64 columns"),
    (160, "sm_90a", "bwd_dq_sm90<bf16, bf16", "tiles must have slabs of 64 columns"),
])
def test_a_head_dim_that_kernels_cannot_have_is_refused(head_dim, arch, only, reason):
    verdicts = dict(judge_all(head_dim, head_dim, arch, only))
    assert verdicts
    for name, verdict in verdicts.items():
        assert not verdict.usable and reason in verdict.text, f"{name}: {verdict}"


def test_a_head_dim_that_kernels_can_have_is_judged_by_its_resources():
    plain, trees, splits = judge_all(32, 32, "sm_80", "thd_attn_fwd<bf16, bf16, false, false")
    assert trees[0].endswith(", Trees>") and splits[0] == "true".join(plain[0].rsplit("false", 1))
    for name, verdict in (plain, trees, splits):
        assert name.startswith("thd_attn_fwd<bf16, bf16, false, false, 32, 32,")
        assert verdict.usable and " registers, 0 bytes spilled, " in verdict.text


def test_a_head_dim_of_the_table_keeps_its_row():
    assert candidate(192, 128, "sm_80") == configs.TILES[192, 128]
    on_sm100 = candidate(128, 128, "sm_100")
    assert on_sm100 == replace(configs.TILES[128, 128], forward=on_sm100.forward) != configs.TILES[128, 128]
