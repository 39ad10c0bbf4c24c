"""What is captured in CUDA graphs: the configuration, and one normaliser for Python callers and command lines.

Needs no GPU. The names are Megatron-LM's, so that its users find their options; older spellings are migrated with a
DeprecationWarning, and what this package does not do (mixture of experts) is refused by name.

Source: megatron/core/transformer/cuda_graph_config.py and docs/user-guide/features/cuda_graph.md of Megatron-LM.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from thdattn.arguments import as_count

IMPLS = ("none", "local", "full_iteration")
MODULES = ("attn", "mlp", "mamba")
INFERENCE_SCOPES = {
    "none": ("none",), "local": ("layer", "block"), "transformer_engine": ("none",), "full_iteration": ("none",),
}  # fmt: skip
ON_OVERFLOW = ("eager", "error")
MIGRATED_MODULES = ("full", "full_iteration", "full_iteration_inference")
EXPERTS = ("moe", "moe_router", "moe_preprocess")


@dataclass(frozen=True)
class CudaGraphConfig:
    """What is captured, and for packs of which size.

    Attributes:
        impl: "none"; "local": a forward and a backward graph per layer, or per part of one; "full_iteration": one graph
            for forward and backward of all micro-batches of a step. "transformer_engine" is taken as "local" without
            graphs for inference, with a warning.
        modules: the parts of a layer that "local" captures, of "attn", "mlp", "mamba"; empty: whole layers.
        inference_scope: "none", "layer" or "block" (the stack of layers is one graph); None: "layer" for "local", else
            "none".
        max_packed_seqs: sequences of a pack that a graph takes; None: as many as its rows can hold, at most 2,048.
        max_tokens_per_rank: rows of a rank that a graph takes; None: those of the first batch.
        warmup_steps: eager runs before a capture, in which kernels are compiled and communicators connect.
        on_overflow: what to do with a batch of more sequences or rows: "eager" runs it without graphs, "error" raises.
        single_pool: graphs share one memory pool: what one has freed, the next may use, as they run in one order.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: an unknown value, or fields that exclude each other; the message names both.
    """

    impl: str = "none"
    modules: tuple[str, ...] = ()
    inference_scope: str | None = None
    max_packed_seqs: int | None = None
    max_tokens_per_rank: int | None = None
    warmup_steps: int = 3
    on_overflow: str = "eager"
    single_pool: bool = True

    def __post_init__(self) -> None:
        impl, modules = _known("impl", self.impl, INFERENCE_SCOPES), _modules("modules", self.modules)
        for name in modules:
            if name not in MODULES:
                raise ValueError(_unknown_module("modules", name))
        if impl == "full_iteration" and modules:
            raise ValueError(
                f"modules is {modules} with impl='full_iteration', wanted modules=() as one graph holds the whole "
                f"iteration; leave modules out, or use impl='local'"
            )
        scope = INFERENCE_SCOPES[impl][0] if self.inference_scope is None else self.inference_scope
        if _known("inference_scope", scope, ("none", "layer", "block")) not in INFERENCE_SCOPES[impl]:
            wanted = " or ".join(map(repr, INFERENCE_SCOPES[impl]))
            raise ValueError(f"inference_scope is {scope!r} with impl={impl!r}, wanted {wanted}; change one of the two")
        if impl == "transformer_engine":
            warnings.warn(
                "impl='transformer_engine' captures per layer and runs as impl='local'; use that", stacklevel=3
            )
            impl = "local"
        for name in ("max_packed_seqs", "max_tokens_per_rank"):
            if getattr(self, name) is not None:
                as_count(name, getattr(self, name), 1)
        as_count("warmup_steps", self.warmup_steps, 0)
        _known("on_overflow", self.on_overflow, ON_OVERFLOW)
        if not isinstance(self.single_pool, bool):
            raise TypeError(f"single_pool is {self.single_pool!r}, wanted True or False")
        for name, value in (("impl", impl), ("inference_scope", scope),
                            ("modules", tuple(m for m in MODULES if m in modules))):  # fmt: skip
            object.__setattr__(self, name, value)


def normalize(
    *,
    cuda_graph_impl: str | None = None,
    cuda_graph_modules: str | Iterable[str] | None = None,
    inference_cuda_graph_scope: str | None = None,
    cuda_graph_max_packed_seqs: int | None = None,
    cuda_graph_warmup_steps: int | None = None,
    cuda_graph_scope: str | Iterable[str] | None = None,
    enable_cuda_graph: bool = False,
    external_cuda_graph: bool = False,
) -> CudaGraphConfig:
    """The configuration that Megatron-LM's options mean, older spellings included.

    Args:
        cuda_graph_impl, cuda_graph_modules, inference_cuda_graph_scope, cuda_graph_max_packed_seqs,
            cuda_graph_warmup_steps: the fields of CudaGraphConfig; modules also as a string with commas.
        cuda_graph_scope: former name of the modules; also "full" (whole layers), "full_iteration" (now an impl) and
            "full_iteration_inference" (now the inference scope "block"), which modules take as well.
        enable_cuda_graph, external_cuda_graph: former names of the impls "local" and "transformer_engine".

    Returns:
        CudaGraphConfig. Each migrated input is a DeprecationWarning that names what to write instead.

    Raises:
        TypeError, ValueError: as CudaGraphConfig; options that exclude each other.
    """
    impl = _impl(cuda_graph_impl, enable_cuda_graph, external_cuda_graph)
    if cuda_graph_scope is not None:
        if cuda_graph_modules is not None and _modules("cuda_graph_modules", cuda_graph_modules):
            raise ValueError(
                "cuda_graph_scope and cuda_graph_modules cannot be set together; leave cuda_graph_scope out"
            )
        _deprecated("cuda_graph_scope", "cuda_graph_modules")
        cuda_graph_modules = cuda_graph_scope
    given = () if cuda_graph_modules is None else _modules("cuda_graph_modules", cuda_graph_modules)
    impl, modules, scope = _migrate(impl, given, inference_cuda_graph_scope)
    counts = {"max_packed_seqs": cuda_graph_max_packed_seqs, "warmup_steps": cuda_graph_warmup_steps}
    config = CudaGraphConfig(impl=impl, modules=modules, inference_scope=scope)
    return replace(config, **{name: count for name, count in counts.items() if count is not None})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds Megatron-LM's flags to a parser; `from_arguments` reads them.

    --cuda-graph-impl, --cuda-graph-modules, --inference-cuda-graph-scope, --cuda-graph-max-packed-seqs,
    --cuda-graph-warmup-steps, and the deprecated --cuda-graph-scope, --enable-cuda-graph, --external-cuda-graph.
    """
    group = parser.add_argument_group("CUDA graphs")
    add = group.add_argument
    add("--cuda-graph-impl", metavar="IMPL", help="none (default), local (per layer) or full_iteration (a whole step)")
    add("--cuda-graph-modules", nargs="*", metavar="PART", help="parts of a layer for local: attn, mlp (default: all)")
    add("--inference-cuda-graph-scope", metavar="SCOPE", help="none, layer (default for local) or block")
    add("--cuda-graph-max-packed-seqs", type=int, metavar="N", help="documents of a pack that a graph takes")
    add("--cuda-graph-warmup-steps", type=int, metavar="N", help="eager steps before the capture (default: 3)")
    add("--cuda-graph-scope", nargs="*", help=argparse.SUPPRESS)
    add("--enable-cuda-graph", action="store_true", help=argparse.SUPPRESS)
    add("--external-cuda-graph", action="store_true", help=argparse.SUPPRESS)


def from_arguments(arguments: argparse.Namespace) -> CudaGraphConfig:
    """The configuration of parsed arguments; see add_arguments and normalize."""
    names = ("cuda_graph_impl", "cuda_graph_modules", "inference_cuda_graph_scope", "cuda_graph_max_packed_seqs",
             "cuda_graph_warmup_steps", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph")  # fmt: skip
    return normalize(**{name: getattr(arguments, name) for name in names})


def _impl(impl: str | None, enable: bool, external: bool) -> str:
    """The impl, from either of its spellings."""
    for name, value in (("enable_cuda_graph", enable), ("external_cuda_graph", external)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, wanted True or False; use cuda_graph_impl instead")
    if enable and external:
        raise ValueError(
            "enable_cuda_graph and external_cuda_graph cannot be enabled at the same time; use cuda_graph_impl"
        )
    if not (enable or external):
        return "none" if impl is None else impl
    flag, meant = ("enable_cuda_graph", "local") if enable else ("external_cuda_graph", "transformer_engine")
    if impl not in (None, "none"):
        raise ValueError(f"{flag} cannot be combined with cuda_graph_impl={impl!r}; leave {flag} out")
    _deprecated(flag, f"cuda_graph_impl={meant!r}")
    return meant


def _migrate(impl: str, modules: tuple[str, ...], scope: str | None) -> tuple[str, tuple[str, ...], str | None]:
    """(impl, modules, inference scope) without the values of modules that are now something else."""
    _known("cuda_graph_impl", impl, INFERENCE_SCOPES)
    old = [name for name in modules if name in MIGRATED_MODULES]
    if len(old) > 1:
        raise ValueError(f"cuda_graph_modules cannot contain {' and '.join(map(repr, old))} together; keep one")
    if not old:
        return impl, modules, scope
    (name,), rest = old, tuple(module for module in modules if module not in old)
    if name == "full":
        if rest:
            raise ValueError(f"cuda_graph_modules has 'full' together with {rest}; 'full' is the whole layer: keep one")
        _deprecated("cuda_graph_modules='full'", "an empty cuda_graph_modules")
    elif name == "full_iteration":
        if impl == "transformer_engine" or scope not in (None, "none"):
            other = f"cuda_graph_impl={impl!r}" if impl == "transformer_engine" else f"inference_cuda_graph_scope={scope!r}"
            raise ValueError(f"cuda_graph_modules='full_iteration' cannot be combined with {other}; leave one out")
        _deprecated("cuda_graph_modules='full_iteration'", "cuda_graph_impl='full_iteration'")
        impl = "full_iteration"
    else:
        if impl in ("transformer_engine", "full_iteration") or scope not in (None, "block"):
            other = f"cuda_graph_impl={impl!r}" if impl not in ("none", "local") else f"inference_cuda_graph_scope={scope!r}"
            raise ValueError(
                f"cuda_graph_modules='full_iteration_inference' cannot be combined with {other}; leave one out"
            )
        meant = "cuda_graph_impl='local' with inference_cuda_graph_scope='block'"
        if impl == "none":
            _warn(f"cuda_graph_modules='full_iteration_inference' has no effect with cuda_graph_impl='none'; use {meant}")
        else:
            _deprecated("cuda_graph_modules='full_iteration_inference'", meant)
            scope = "block"
    return impl, rest, scope


def _modules(argument: str, value: Any) -> tuple[str, ...]:
    """The names in a string with commas, or in an iterable of such strings."""
    if isinstance(value, str):
        value = [value]
    try:
        items = list(value)
    except TypeError:
        raise TypeError(f"{argument} is {value!r}, wanted names of {', '.join(MODULES)}; pass a tuple of them") from None
    names: list[str] = []
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{argument} holds {item!r}, a {type(item).__name__}; wanted names of {', '.join(MODULES)}")
        names += [name.strip() for name in item.split(",") if name.strip()]
    for name in names:
        if name not in (*MODULES, *MIGRATED_MODULES):
            raise ValueError(_unknown_module(argument, name))
    return tuple(dict.fromkeys(names))


def _unknown_module(argument: str, name: str) -> str:
    why = "mixture of experts is not part of this package" if name in EXPERTS else "that is no part of a layer"
    return f"{argument} has {name!r}, wanted some of {', '.join(map(repr, MODULES))}: {why}; leave it out"


def _known(name: str, value: Any, known: Iterable[str]) -> str:
    """The value, if it is one of the known strings."""
    wanted = ", ".join(map(repr, known))
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; wanted one of {wanted}")
    if value not in known:
        raise ValueError(f"{name} is {value!r}, wanted one of {wanted}; pass one of these")
    return value


def _deprecated(old: str, new: str) -> None:
    _warn(f"{old} is deprecated, use {new} instead")


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=4)
