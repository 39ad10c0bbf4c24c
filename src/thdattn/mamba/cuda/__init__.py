"""The mixer on CUDA: the functions of thdattn.mamba.reference with the same arguments."""

from __future__ import annotations

from thdattn.mamba.configs import MIXER_SIZES
from thdattn.mamba.cuda.backward import (
    mixer_add_halos,
    mixer_backward_bytes,
    mixer_conv_bwd,
    mixer_gate_states,
    ssd_bwd,
    ssd_gradients,
)  # fmt: skip
from thdattn.mamba.cuda.decode import mixer_decode, mixer_fill
from thdattn.mamba.cuda.forward import (
    mixer_conv,
    mixer_conv_bytes,
    mixer_conv_states,
    mixer_forward_bytes,
    mixer_halo,
    mixer_tail,
    ssd_enter,
    ssd_fold,
    ssd_scan,
    ssd_segment_rows,
    ssd_start,
    ssd_states,
)  # fmt: skip
from thdattn.mamba.cuda.norm import mixer_norm, mixer_norm_states

__all__ = [
    "MIXER_SIZES", "mixer_add_halos", "mixer_backward_bytes", "mixer_conv", "mixer_conv_bwd", "mixer_conv_bytes",
    "mixer_conv_states", "mixer_decode", "mixer_fill", "mixer_forward_bytes", "mixer_gate_states", "mixer_halo",
    "mixer_norm", "mixer_norm_states", "mixer_tail", "ssd_bwd", "ssd_enter", "ssd_fold", "ssd_gradients",
    "ssd_scan", "ssd_segment_rows", "ssd_start", "ssd_states",
]  # fmt: skip
