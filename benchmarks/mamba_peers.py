"""Peers of Mamba-2 mixers: this package, also with its portable kernels, and mamba_ssm's Triton kernels if importable.

Of mamba_ssm it takes a copy of mamba_ssm/ops/triton/{softplus,ssd_bmm,ssd_chunk_state,ssd_state_passing,ssd_chunk_scan,
ssd_combined,layernorm_gated,k_activations}.py and mamba_ssm/utils/{torch,determinism}.py with empty __init__.py beside
them, because the package imports CUDA extensions that have to be built. The convolution of the mixer is fla-core's,
whose result is copied to its place in the gradient.

Triton's tuner measures every candidate of every kernel, which takes longer than the measurement; see tune_for. With
TRITON_CACHE_AUTOTUNING=1 it keeps what it compiled and chose for the next run.

Two parts are timed. "scan": recurrence and gate from x, B, C, dt and z. "mixer": the same with the convolution, from
the rows of an input projection.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
from mamba_cases import NORM_EPS, MixerCase, MixerInputs
from mamba_exact import OF_ROWS
from peers import CupyPeer, Peer, TorchPeer, tensor

import thdattn
from thdattn.fuzz.runs import portable_kernels
from thdattn.mamba import context_parallel
from thdattn.mamba.shape import Inputs, Mamba2Weights

CHUNK = 256  # rows, mamba_ssm's default


class OurMixer(CupyPeer):
    """Mamba2Mixer on this rank's rows, on one rank by default."""

    grads: tuple[Any, Mamba2Weights] | None = None

    @classmethod
    def version(cls) -> str:
        return thdattn.__version__

    def __init__(self, case: MixerCase, inputs: MixerInputs, comm: thdattn.comm.Comm | None = None) -> None:
        self.case, self.inputs = case, inputs
        self.mixer = case.mixer(comm or thdattn.comm.init("single"), "cuda")
        self.plan = self.mixer.plan(case.batch())

    def forward(self) -> None:
        self.out, self.saved = self.mixer.forward(self.inputs.zxbcdt, self.inputs.weights, self.plan)

    def backward(self) -> None:
        self.grads = self.mixer.backward(self.inputs.dout, self.saved)

    def results(self) -> Sequence[Any]:
        if self.grads is None:
            return (self.out,)
        dzxbcdt, dweights = self.grads
        return self.out, *columns(self.case, dzxbcdt), *dweights


class OurScan(OurMixer):
    """Mamba2Mixer without its convolution, forward and backward."""

    def __init__(self, case: MixerCase, inputs: MixerInputs) -> None:
        super().__init__(case, inputs)
        self.alone = _WithoutConvolution(self.mixer._mixer, inputs.channels)
        self.layer = context_parallel.Layer(self.alone, self.mixer.comm, self.mixer._shape)

    def forward(self) -> None:
        self.out, self.kept = context_parallel.forward(self.layer, self.plan, self.inputs.zxbcdt, self.inputs.weights)

    def backward(self) -> None:
        inputs = self.inputs
        self.grads = context_parallel.backward(
            self.layer, self.plan, inputs.dout, inputs.zxbcdt, inputs.weights, self.kept)

    def results(self) -> Sequence[Any]:
        if self.grads is None:
            return (self.out,)
        dzxbcdt, dweights = self.grads
        dz, rows = columns(self.case, dzxbcdt)[0], len(dzxbcdt)
        of_channels = (x.reshape(rows, -1) for x in self.case.shape.split(self.alone.dchannels()))
        return self.out, dz, *of_channels, columns(self.case, self.alone.dzxbcdt)[-1], *dweights[2:]


class PortableMixer(OurMixer):
    """Mamba2Mixer with the portable kernels, which it chooses in every call."""

    def __init__(self, case: MixerCase, inputs: MixerInputs) -> None:
        with portable_kernels():
            super().__init__(case, inputs)

    def forward(self) -> None:
        with portable_kernels():
            super().forward()

    def backward(self) -> None:
        with portable_kernels():
            super().backward()


class PortableScan(PortableMixer, OurScan):
    """OurScan with the portable kernels."""


class _WithoutConvolution:
    """Engine whose convolution is replaced: forward by given channels, backward by the result of the first call.

    dzxbcdt: of the first call, the only one with columns of dt.
    """

    def __init__(self, engine: Any, channels: Any) -> None:
        self._engine, self._channels = engine, channels
        self._act: Any = None
        self._gradients: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def mixer_conv_states(self, inputs: Inputs, keep: bool) -> Any:
        if self._act is None:
            self._act = self._engine.mixer_conv(inputs, keep)._replace(channels=self._channels)
        act = self._act
        return act, *self._engine.mixer_states(act, inputs.plan, inputs.shape)

    def mixer_conv_bwd(self, inputs: Inputs, of_scan: Any, dzxbcdt: Any) -> Any:
        self._of_scan = of_scan
        if self._gradients is None:
            self._gradients = self._engine.mixer_conv_bwd(inputs, of_scan, dzxbcdt)
            self.dzxbcdt = dzxbcdt
        return self._gradients

    def dchannels(self) -> Any:
        """Return the gradient of the channels in the last call; those of B and C may be sums of parts."""
        made = self._of_scan
        if hasattr(made, "channels"):
            return made.channels
        return cupy.concatenate([made.dx.astype(np.float32), made.dbc.sum(axis=0)], axis=1)


def columns(case: MixerCase, dzxbcdt: Any) -> list[Any]:
    """Split an array or tensor into dz, dx, dB, dC, ddt."""
    inner, width = case.shape.d_inner, case.groups * case.state_dim
    ends = np.cumsum([0, inner, inner, width, width, case.heads]).tolist()
    return [dzxbcdt[:, begin:end] for begin, end in pairwise(ends)]


class MambaSsmScan(TorchPeer):
    """mamba_chunk_scan_combined: x, B, C are columns of one array, z and dt of another, as in mamba_ssm's mixer."""

    names = OF_ROWS

    @classmethod
    def version(cls) -> str:
        import mamba_ssm.ops.triton.ssd_combined  # noqa: F401 - fails early where a part is missing

        return version_of("mamba_ssm")

    def __init__(self, case: MixerCase, inputs: MixerInputs) -> None:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        self.scan, self.case = mamba_chunk_scan_combined, case
        _, _, a_log, d, dt_bias, *of_norm = map(tensor, inputs.weights)
        z, *_, dt = columns(case, tensor(inputs.zxbcdt))
        x, b, c = case.shape.split(tensor(inputs.channels))
        leaves = [part.unsqueeze(0) for part in (z.unflatten(1, (case.heads, -1)), x, b, c, dt)]
        self.rates = -a_log.exp()
        dout = tensor(inputs.dout).view(*leaves[1].shape)
        super().__init__([*leaves, self.rates, d, dt_bias, *of_norm], dout)
        self.labels = sequence_labels(case)

    def call(self, *leaves: Any) -> Any:
        z, x, b, c, dt, rates, d, dt_bias, *of_norm = leaves
        gate = None if of_norm else z
        y = self.scan(x, dt, rates, b, c, CHUNK, D=d, z=gate, dt_bias=dt_bias, seq_idx=self.labels, dt_softplus=True)
        if not of_norm:
            return y
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

        norm = self.case.norm == "before_gate"
        flat = rmsnorm_fn(y.flatten(2), *of_norm, None, z=z.flatten(2), eps=NORM_EPS,
                          group_size=self.case.shape.d_inner // self.case.groups, norm_before_gate=norm)
        return flat.view_as(y)

    def results(self) -> Sequence[Any]:
        *of_rows, drates, dd, ddt_bias = super().results() if self.grads else (*super().results(), None, None, None)
        flat = [x.flatten(2).squeeze(0) for x in of_rows]
        return [*flat, self.rates * drates, dd, ddt_bias] if self.grads else flat


class MambaSsmMixer(TorchPeer):
    """mamba_split_conv1d_scan_combined, with fla-core's convolution."""

    names = OF_ROWS

    @classmethod
    def version(cls) -> str:
        from fla.modules.causal_conv1d import causal_conv1d_bwd  # noqa: F401 - fails early where it is missing

        return f"{MambaSsmScan.version()} with the convolution of fla-core {version_of('fla-core')}"

    def __init__(self, case: MixerCase, inputs: MixerInputs) -> None:
        from mamba_ssm.ops.triton import ssd_combined

        self.case, self.mixer = case, ssd_combined.mamba_split_conv1d_scan_combined
        weight, bias, a_log, d, dt_bias, *of_norm = map(tensor, inputs.weights)
        self.rates = -a_log.exp()
        leaves = [tensor(inputs.zxbcdt).unsqueeze(0), weight, bias, self.rates, d, dt_bias, *of_norm]
        super().__init__(leaves, tensor(inputs.dout).unsqueeze(0))
        self.labels = sequence_labels(case)
        convolution = FlaConvolution(case)
        ssd_combined.causal_conv1d_fwd_function = convolution.forward
        ssd_combined.causal_conv1d_bwd_function = convolution.backward

    def call(self, *leaves: Any) -> Any:
        zxbcdt, weight, bias, rates, d, dt_bias, *of_norm = leaves
        case = self.case
        norm = dict(zip(["rmsnorm_weight"], of_norm, strict=False))
        return self.mixer(zxbcdt, weight, bias, dt_bias, rates, d, CHUNK, seq_idx=self.labels, headdim=case.head_dim,
                          ngroups=case.groups, rmsnorm_eps=NORM_EPS, norm_before_gate=case.norm == "before_gate",
                          **norm)

    def results(self) -> Sequence[Any]:
        out, *grads = super().results()
        if not grads:
            return [out.squeeze(0)]
        dzxbcdt, dweight, dbias, drates, dd, ddt_bias = grads
        of_rows = columns(self.case, dzxbcdt.squeeze(0))
        return [out.squeeze(0), *of_rows, dweight, dbias, self.rates * drates, dd, ddt_bias]


class FlaConvolution:
    """fla-core's Triton kernels as mamba_ssm calls causal-conv1d's, over the sequences of a case."""

    def __init__(self, case: MixerCase) -> None:
        from fla.modules import causal_conv1d
        from fla.ops.utils import prepare_chunk_indices

        self._fla = causal_conv1d
        begins = tensor(cupy.asarray(np.cumsum([0, *case.lengths], dtype=np.int64)))
        self._pack = {"cu_seqlens": begins, "chunk_indices": prepare_chunk_indices(begins, 64)}

    def forward(self, x: Any, weight: Any, bias: Any, *_: Any) -> Any:
        """Return silu of the convolution of (1, channels, rows)."""
        y, _ = self._fla.causal_conv1d_fwd(
            x=x.transpose(1, 2), weight=weight, bias=bias, residual=None, activation="silu", **self._pack
        )
        return y.transpose(1, 2)

    def backward(self, x: Any, weight: Any, bias: Any, dout: Any, *_: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of x, weight and bias."""
        dx, dweight, dbias, *_ = self._fla.causal_conv1d_bwd(
            x=x.transpose(1, 2), dy=dout.transpose(1, 2), dht=None, weight=weight, bias=bias, activation="silu",
            **self._pack,
        )
        return dx.transpose(1, 2), dweight, dbias


def sequence_labels(case: MixerCase) -> Any:
    """Return seq_idx of mamba_ssm: (1, rows) int32, the number of each row's sequence."""
    return tensor(cupy.asarray(np.repeat(np.arange(len(case.lengths), dtype=np.int32), case.lengths)[None]))


def tune_for(ms: int) -> None:
    """Let Triton's tuner measure each candidate for so long, after a quarter of that; it takes 100 and 25 ms."""
    import triton.testing

    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=max(1, ms // 4), rep=ms)


def version_of(package: str) -> str:
    """Return the version of a package; "unknown" of files that were only copied."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


PEERS: dict[str, dict[str, type[Peer]]] = {
    "mixer": {"ours": OurMixer, "portable": PortableMixer, "mamba_ssm": MambaSsmMixer},
    "scan": {"ours": OurScan, "portable": PortableScan, "mamba_ssm": MambaSsmScan},
}
