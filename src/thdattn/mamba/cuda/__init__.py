"""The mixer on CUDA: the functions of thdattn.mamba.reference with the same arguments."""

from __future__ import annotations

from thdattn.mamba.configs import MIXER_SIZES
from thdattn.mamba.cuda.backward import (
    mixer_add_halos,
    mixer_backward_buffers,
    mixer_bwd,
    mixer_conv_bwd,
    mixer_gate_states,
    mixer_gradients,
)
from thdattn.mamba.cuda.decode import mixer_decode, mixer_fill
from thdattn.mamba.cuda.forward import (
    mixer_activations,
    mixer_conv,
    mixer_conv_states,
    mixer_enter,
    mixer_fold,
    mixer_fold_trees,
    mixer_forward_buffers,
    mixer_scan,
    mixer_segment_rows,
    mixer_start,
    mixer_states,
)
from thdattn.mamba.cuda.norm import mixer_norm
from thdattn.mamba.cuda.trees import mixer_add_copies, mixer_clear_dt
