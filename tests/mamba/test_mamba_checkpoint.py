"""A layer with the weights of a mamba_ssm or Megatron-Core checkpoint is what these compute, in float64, by torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mixer_cases import Case

import thdattn
from thdattn.mamba.oracle import Norm, Sizes

torch = pytest.importorskip("torch")
functional = torch.nn.functional

HIDDEN, EPS = 10, 1e-5
PACK = Case("documents", (13, 1, 70, 2), padded=(14, 3, 70, 4), sizes=Sizes(4, 3, 5, 2))


def checkpoint(sizes, seed=0):
    """Draw random weights by a layer's names: Mamba2 of mamba_ssm, and below "mixer." MambaMixer of Megatron."""
    rng = np.random.default_rng(seed)
    heads, head_dim, state_dim, groups = sizes
    inner = heads * head_dim
    channels = inner + 2 * groups * state_dim
    shapes = {"in_proj.weight": (inner + channels + heads, HIDDEN), "conv1d.weight": (channels, 1, 4),
              "conv1d.bias": (channels,), "A_log": (heads,), "D": (heads,), "dt_bias": (heads,),
              "norm.weight": (inner,), "out_proj.weight": (HIDDEN, inner)}
    return {name: torch.tensor(rng.uniform(-1, 1, shape), requires_grad=True) for name, shape in shapes.items()}


def layer(u, state, sizes, norm_before_gate, group_size):
    """Compute a layer over one document, (tokens, HIDDEN), by the formulas of mamba_ssm's modules/mamba2.py."""
    heads, head_dim, state_dim, groups = sizes
    inner, width = heads * head_dim, groups * state_dim
    z, xbc, dt = (u @ state["in_proj.weight"].T).split([inner, inner + 2 * width, heads], dim=1)
    convolved = functional.conv1d(xbc.T[None], state["conv1d.weight"], state["conv1d.bias"], padding=3,
                                  groups=inner + 2 * width)[0, :, : len(u)].T
    x, b, c = functional.silu(convolved).split([inner, width, width], dim=1)
    x = x.unflatten(1, (heads, head_dim))
    b, c = (part.unflatten(1, (groups, state_dim)).repeat_interleave(heads // groups, dim=1) for part in (b, c))
    dt, rates = functional.softplus(dt + state["dt_bias"]), -torch.exp(state["A_log"])
    s, rows = torch.zeros(heads, head_dim, state_dim, dtype=torch.float64), []
    for t in range(len(u)):
        s = torch.exp(dt[t] * rates)[:, None, None] * s + torch.einsum("h,hn,hp->hpn", dt[t], b[t], x[t])
        rows.append(torch.einsum("hpn,hn->hp", s, c[t]) + state["D"][:, None] * x[t])
    y = torch.stack(rows).flatten(1)
    return gated_norm(y, state["norm.weight"], z, group_size, norm_before_gate) @ state["out_proj.weight"].T


def gated_norm(x, weight, z, group_size, norm_before_gate):
    """Compute RMSNormGated of mamba_ssm, see rms_norm_ref in its ops/triton/layernorm_gated.py."""
    if not norm_before_gate:
        x = x * functional.silu(z)
    groups = x.unflatten(1, (-1, group_size))
    normal = (groups / torch.sqrt(groups.square().mean(dim=-1, keepdim=True) + EPS)).flatten(1) * weight
    return normal * functional.silu(z) if norm_before_gate else normal


def weights_of(state):
    """Return a mixer's weights of a checkpoint."""
    return thdattn.Mamba2Weights(state["conv1d.weight"][:, 0], state["conv1d.bias"], state["A_log"], state["D"],
                                 state["dt_bias"], state["norm.weight"])


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize(("groups", "norm_groups"), [(2, 2), (1, 1), (4, 1)])
def test_a_layer_from_a_checkpoint_gives_the_same_numbers(groups, norm_groups, norm_before_gate, cp_size):
    """Output, and gradients of all weights of the checkpoint; norm_groups is d_inner over the group_size there."""
    sizes = Sizes(4, 3, 5, groups)
    case = replace(PACK, sizes=sizes, norm=Norm(not norm_before_gate, norm_groups, EPS))
    state = checkpoint(sizes)
    rng = np.random.default_rng(1)
    texts, douts = ([torch.tensor(rng.standard_normal((n, HIDDEN))) for n in case.lengths] for _ in range(2))
    wanted = [layer(u, state, sizes, norm_before_gate, 12 // norm_groups) for u in texts]
    sum((out * dout).sum() for out, dout in zip(wanted, douts, strict=True)).backward()

    arrays = {name: x.detach().numpy() for name, x in state.items()}
    u, dout = (case.batch.pack([x.numpy() for x in each], fill=np.nan) for each in (texts, douts))

    def program(comm):
        mixer = case.mixer(comm, np.float64)
        plan = mixer.plan(case.batch)
        rows, of_out = plan.shard(u), plan.shard(dout)
        y, saved = mixer.forward(rows @ arrays["in_proj.weight"].T, weights_of(arrays), plan)
        dzxbcdt, dweights = mixer.backward(of_out @ arrays["out_proj.weight"], saved)
        valid = np.asarray(plan.valid)
        of_projections = dzxbcdt[valid].T @ rows[valid], of_out[valid].T @ y[valid]
        return plan.unshard(y @ arrays["out_proj.weight"].T, comm), of_projections, dweights

    ranks = thdattn.comm.run_local(cp_size, program)
    for made, exact in zip(case.batch.unpack(ranks[0][0]), wanted, strict=True):
        np.testing.assert_allclose(made, exact.detach().numpy(), rtol=1e-10, atol=1e-12)
    of_in, of_out = (sum(rank[1][i] for rank in ranks) for i in range(2))
    found = dict(zip(("in_proj.weight", "out_proj.weight"), (of_in, of_out), strict=True))
    summed = thdattn.Mamba2Weights(*(sum(each) for each in zip(*(rank[2] for rank in ranks), strict=True)))
    gradients = weights_of({name: x.grad.numpy() for name, x in state.items()})
    for name, gradient in summed._asdict().items():
        np.testing.assert_allclose(gradient, getattr(gradients, name), rtol=1e-9, atol=1e-11, err_msg=name)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, state[name].grad.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


def test_next_tokens_of_a_layer_from_a_checkpoint_are_those_of_its_forward():
    sizes = Sizes(4, 3, 5, 2)
    case, state = replace(PACK, sizes=sizes, norm=Norm(True, 2, EPS)), checkpoint(sizes)
    u = np.random.default_rng(2).standard_normal((9, HIDDEN))
    arrays = {name: x.detach().numpy() for name, x in state.items()}
    mixer = case.mixer(thdattn.comm.init("single"), np.float64)
    cache = mixer.cache(1)
    for t, exact in enumerate(layer(torch.tensor(u), state, sizes, False, 6).detach().numpy()):
        y = mixer.decode(u[t : t + 1] @ arrays["in_proj.weight"].T, weights_of(arrays), cache)
        np.testing.assert_allclose(y[0] @ arrays["out_proj.weight"].T, exact, rtol=1e-10, atol=1e-12)
