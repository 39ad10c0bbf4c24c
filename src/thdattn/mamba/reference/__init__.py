"""The mixer on NumPy: the functions of thdattn.mamba.cuda with the same arguments."""

from __future__ import annotations

from thdattn.mamba.reference.conv import (
    mixer_activations,
    mixer_add_halos,
    mixer_conv,
    mixer_conv_bwd,
    mixer_conv_states,
    mixer_forward_buffers,
)
from thdattn.mamba.reference.decode import mixer_decode, mixer_fill
from thdattn.mamba.reference.gate import mixer_gate_states, mixer_norm
from thdattn.mamba.reference.ssd import (
    mixer_backward_buffers,
    mixer_bwd,
    mixer_enter,
    mixer_fold,
    mixer_fold_trees,
    mixer_gradients,
    mixer_scan,
    mixer_segment_rows,
    mixer_start,
    mixer_states,
)
from thdattn.mamba.reference.trees import mixer_add_copies, mixer_clear_dt

MIXER_SIZES: dict[str, range] = {}  # all sizes
