"""Configuration of CUDA graphs, and one normaliser for Python callers and command lines.

It needs no GPU. The names are Megatron-LM's, so that its users find their options. Former names are migrated with a
FutureWarning, which users see. Unsupported features (mixture of experts) are refused by name.

Source: megatron/core/transformer/cuda_graph_config.py and docs/user-guide/features/cuda_graph.md of Megatron-LM.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, NamedTuple

from thdattn.arguments import as_bool, as_choice, as_count, found

MODULES = ("attn", "mlp", "mamba")
ON_OVERFLOW = ("eager", "error")
SCOPES = {  # impl -> its inference scopes, the default first
    "none": ("none",), "local": ("layer", "block"), "transformer_engine": ("none",), "full_iteration": ("none",),
}
PARTS = (*MODULES, "layer")  # arguments of Graphs.captures
OTHER_NAMES = {  # modules of Megatron-LM, now or before -> why they are refused
    **dict.fromkeys(("moe", "moe_router", "moe_preprocess"), "mixture of experts is not part of this package"),
    "module_scoped": "Megatron-LM has removed it",
}
FLAGS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}  # former name -> impl

# Names of fields and former options in messages: to callers of CudaGraphConfig, of normalize, and of a command line.
AS_FIELDS = {name: name for name in ("impl", "modules", "inference_scope", "max_packed_seqs", "max_tokens_per_rank",
                                     "warmup_steps", "on_overflow", "single_pool", "max_packed_nodes",
                                     "cuda_graph_scope")}
AS_OPTIONS = {
    "impl": "cuda_graph_impl", "modules": "cuda_graph_modules", "inference_scope": "inference_cuda_graph_scope",
    "max_packed_seqs": "cuda_graph_max_packed_seqs", "warmup_steps": "cuda_graph_warmup_steps",
    "cuda_graph_scope": "cuda_graph_scope", **{name: name for name in FLAGS},
}
AS_FLAGS = {name: "--" + option.replace("_", "-") for name, option in AS_OPTIONS.items()}

Notices = list[tuple[type[Warning], str]]


class _Name(str, Enum):
    """Name that is a string too: equal to it, and shown as it in messages."""

    __repr__ = str.__repr__
    __str__ = str.__str__


class CudaGraphModule(_Name):
    """Parts of a layer, for `modules`. Those of mixture of experts are refused by name."""

    attn = "attn"
    mlp = "mlp"
    mamba = "mamba"
    moe = "moe"
    moe_router = "moe_router"
    moe_preprocess = "moe_preprocess"


class InferenceCudaGraphScope(_Name):
    """Work that is one graph in decoding, for `inference_scope`."""

    none = "none"
    layer = "layer"
    block = "block"


class CudaGraphScope(_Name):
    """Values of the former option cuda_graph_scope."""

    full_iteration = "full_iteration"
    attn = "attn"
    mlp = "mlp"
    moe = "moe"
    moe_router = "moe_router"
    moe_preprocess = "moe_preprocess"
    mamba = "mamba"
    full_iteration_inference = "full_iteration_inference"


class _AsLocal(str):
    """The impl "local" of a configuration that was asked for "transformer_engine".

    It keeps the refusals of that name where dataclasses.replace makes another configuration of it.
    """


@dataclass(frozen=True)
class CudaGraphConfig:
    """Selection of what is captured, and the sizes of the packs that graphs take.

    Attributes:
        impl: "none"; "local": a forward and a backward graph per layer, or per part of one; "full_iteration": one graph
            for forward and backward of all micro-batches of a step. "transformer_engine" becomes "local" without graphs
            for inference, with a warning.
        modules: the parts of a layer that "local" captures, of "attn", "mlp" and "mamba", in this order; empty: whole
            layers. A string with commas and members of CudaGraphModule are accepted too. See Graphs.captures.
        inference_scope: "none", "layer" (every whole layer is a graph) or "block" (the stack of layers is one). None
            becomes "layer" for "local", which always has graphs for inference, else "none".
        max_packed_seqs: most sequences of a pack that a graph takes; None: as many as its rows can hold, at most 2,048.
        max_tokens_per_rank: most rows of a rank that a graph takes; None: those of the first batch.
        warmup_steps: eager runs before a capture, which compile kernels and connect communicators; with 0 they do so
            while capturing.
        on_overflow: for a batch of more sequences or rows, or whose ranks exchange more than a BalancedCapacity:
            "eager" runs it without graphs, "error" raises.
        max_packed_nodes: most nodes of the prefix trees of a pack that a graph takes; None: no trees.
        single_pool: True gives all graphs one memory pool: a later graph reuses memory that an earlier one has freed,
            as they run in one order.

    Args:
        cuda_graph_scope: former name of the modules; it and former values of the modules are migrated as `normalize`
            does, with a FutureWarning.

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
    max_packed_nodes: int | None = None
    cuda_graph_scope: InitVar[Any] = None

    def __post_init__(self, cuda_graph_scope: Any) -> None:
        former = {} if cuda_graph_scope is None else {"cuda_graph_scope": cuda_graph_scope}
        fields, notices = _migrated({**vars(self), **former}, AS_FIELDS)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for category, text in notices:
            warnings.warn(text, category, stacklevel=3)


def normalize(**options: Any) -> CudaGraphConfig:
    """Return the configuration that Megatron-LM's options mean, former names included; None is an option left out.

    Args:
        cuda_graph_impl, cuda_graph_modules, inference_cuda_graph_scope, cuda_graph_max_packed_seqs,
            cuda_graph_warmup_steps: the fields of CudaGraphConfig, as it takes them.
        cuda_graph_scope: former name of the modules. Both names also take "full" (now no modules), "full_iteration"
            (now an impl) and "full_iteration_inference" (now the impl "local" with the inference scope "block"). Alone
            the last one means that too, as in Megatron-LM's table of former names, although its code captures nothing
            then.
        enable_cuda_graph, external_cuda_graph: True is the impl "local", "transformer_engine".

    Returns:
        CudaGraphConfig. Each migrated option gives a FutureWarning that names its replacement.

    Raises:
        TypeError: an option of the wrong type, or an unknown option.
        ValueError: an unknown value, or options that exclude each other; the message names both.
    """
    fields, notices = _normalized(options, AS_OPTIONS)
    for category, text in notices:
        warnings.warn(text, category, stacklevel=2)
    return CudaGraphConfig(**fields)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags to a parser, and former ones without listing them; `from_arguments` reads them."""
    add = parser.add_argument_group("CUDA graphs").add_argument
    add(AS_FLAGS["impl"], metavar="IMPL",
        help="capture none (default), local (each layer) or full_iteration (a whole step)")
    add(AS_FLAGS["modules"], nargs="*", metavar="PART",
        help="capture these parts of a layer with local: attn, mlp, mamba (default: whole layers)")
    add(AS_FLAGS["inference_scope"], metavar="SCOPE",
        help="capture each layer (default for local), the block of all layers, or none in inference")
    add(AS_FLAGS["max_packed_seqs"], type=int, metavar="N", help="capture packs of up to N documents")
    add(AS_FLAGS["warmup_steps"], type=int, metavar="N", help="run N steps eagerly before a capture (default: 3)")
    add(AS_FLAGS["cuda_graph_scope"], nargs="*", help=argparse.SUPPRESS)
    for flag in FLAGS:
        add(AS_FLAGS[flag], action="store_true", help=argparse.SUPPRESS)


def from_arguments(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, no_inference: str = ""
) -> CudaGraphConfig:
    """Return the configuration that parsed flags mean, as `normalize` does.

    An error of `normalize` becomes an error of the parser, which ends the program with a message and status 2.

    Args:
        parser: the parser that `add_arguments` was called with.
        arguments: its result.
        no_inference: the reason why the program captures nothing for inference; flags that ask for a layer or a block
            are an error that gives it. "": no such error.
    """
    options = {option: getattr(arguments, option) for option in AS_OPTIONS.values()}
    try:
        fields, notices = _normalized(options, AS_FLAGS, no_inference)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    for category, text in notices:
        warnings.warn(text, category, stacklevel=2)
    return CudaGraphConfig(**fields)


# ------------------------------------------------------------------------------------------------ former names


class Migration(NamedTuple):
    """Former value of the modules: its meaning today, and the values of other fields that may accompany it."""

    beside: dict[str, tuple[str | None, ...]]
    meaning: dict[str, str]

    def now(self, names: dict[str, str]) -> str:
        """Return what to write instead."""
        return " with ".join(f"{names[field]}={value!r}" for field, value in self.meaning.items())


MIGRATIONS = {
    "full": Migration({}, {"modules": ""}),
    "full_iteration": Migration(
        {"impl": ("none", "local", "full_iteration"), "inference_scope": (None, "none")}, {"impl": "full_iteration"}
    ),
    "full_iteration_inference": Migration(
        {"impl": ("none", "local"), "inference_scope": (None, "block")}, {"impl": "local", "inference_scope": "block"}
    ),
}


def _normalized(
    options: dict[str, Any], names: dict[str, str], no_inference: str = ""
) -> tuple[dict[str, Any], Notices]:
    """Return the fields that options mean, and the warnings; options that are None are left out."""
    field_of = {option: name for name, option in AS_OPTIONS.items()}
    unknown = sorted(options.keys() - field_of)
    if unknown:
        raise TypeError(f"{unknown[0]} is no option of CUDA graphs, wanted {', '.join(field_of)}; leave it out")
    given = {field_of[option]: value for option, value in options.items() if value is not None}
    return _migrated(given, names, no_inference)


def _migrated(
    given: dict[str, Any], names: dict[str, str], no_inference: str = ""
) -> tuple[dict[str, Any], Notices]:
    """Return the checked fields as a configuration keeps them, and the warnings to give."""
    notices: Notices = []
    fields: dict[str, Any] = {"impl": "none", "inference_scope": None}
    fields |= {name: check(names[name], given[name]) for name, check in CHECKS.items() if name in given}
    fields["impl"] = _migrated_flags(fields["impl"], given, names, notices)
    fields |= _migrated_modules(fields, given, names, notices)
    if no_inference and fields["inference_scope"] not in (None, "none"):
        by = next(name for name in ("inference_scope", "cuda_graph_scope", "modules") if given.get(name))
        raise ValueError(f"{names[by]} is {_plain(given[by])!r}, wanted no graph for inference, as {no_inference}; "
                         f"leave it out")
    if fields["impl"] == "transformer_engine":
        notices.append((UserWarning, _runs_as_local(names["impl"])))
    return _consistent(fields, names), notices


def _migrated_flags(impl: str, given: dict[str, Any], names: dict[str, str], notices: Notices) -> str:
    """Return the impl, from either of its names."""
    flags = [flag for flag in FLAGS if flag in given and as_bool(names[flag], given[flag])]
    if len(flags) > 1:
        both = " and ".join(names[flag] for flag in flags)
        raise ValueError(f"{both} cannot be enabled at the same time, wanted one; use {names['impl']} instead")
    for flag in flags:
        if impl != "none":
            raise ValueError(f"{names[flag]} cannot be combined with {names['impl']}={impl!r}, wanted one of the two; "
                             f"leave {names[flag]} out")
        impl = FLAGS[flag]
        notices.append(_deprecated(names[flag], f"{names['impl']}={impl!r}"))
    return impl


def _migrated_modules(
    fields: dict[str, Any], given: dict[str, Any], names: dict[str, str], notices: Notices
) -> dict[str, Any]:
    """Return the modules, and the fields that their former values mean."""
    called = names["modules"]
    listed = _listed(called, given.get("modules", ()))
    if "cuda_graph_scope" in given:
        called = names["cuda_graph_scope"]
        if listed:
            raise ValueError(f"{called} and {names['modules']} cannot be set together, wanted one; leave {called} out")
        notices.append(_deprecated(called, names["modules"]))
        listed = _listed(called, given["cuda_graph_scope"])
    former = [name for name in listed if name in MIGRATIONS]
    modules = _modules(called, [name for name in listed if name not in MIGRATIONS])
    if len(former) > 1 or (modules and former and former != ["full_iteration_inference"]):
        raise ValueError(f"{called} cannot contain {' and '.join(map(repr, listed))} together, wanted one of them; "
                         f"leave the others out")
    if not former:
        return {"modules": modules}
    (name,) = former
    migration, what = MIGRATIONS[name], f"{called}={name!r}"
    for field, values in migration.beside.items():
        if fields[field] not in values:
            raise ValueError(f"{what} cannot be combined with {names[field]}={fields[field]!r}, wanted one of the two; "
                             f"leave one out")
    notices.append(_deprecated(what, migration.now(names)))
    return {**migration.meaning, "modules": modules}


def _deprecated(former: str, now: str) -> tuple[type[Warning], str]:
    return FutureWarning, f"{former} is deprecated, use {now} instead"


def _runs_as_local(impl: str) -> str:
    return f"{impl}='transformer_engine' captures per layer and runs as {impl}='local' without graphs for inference"


# ------------------------------------------------------------------------------------------------ checks


def _consistent(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return checked fields as a configuration keeps them; raise a ValueError where they exclude each other."""
    impl = "transformer_engine" if isinstance(fields["impl"], _AsLocal) else fields["impl"]
    if impl == "full_iteration" and fields["modules"]:
        raise ValueError(f"{names['modules']} is {fields['modules']} with {names['impl']}='full_iteration', wanted "
                         f"none, as one graph holds the whole iteration; leave them out, or use "
                         f"{names['impl']}='local'")
    scope = SCOPES[impl][0] if fields["inference_scope"] is None else fields["inference_scope"]
    if scope not in SCOPES[impl]:
        raise ValueError(f"{names['inference_scope']} is {scope!r} with {names['impl']}={impl!r}, wanted "
                         f"{' or '.join(map(repr, SCOPES[impl]))}; change one of the two, or leave the first out")
    return {**fields, "impl": _AsLocal("local") if impl == "transformer_engine" else impl, "inference_scope": scope}


def _modules(called: str, value: Any) -> tuple[str, ...]:
    """Return modules in their order, each once."""
    names = _listed(called, value)
    for name in names:
        if name not in MODULES:
            why, close = OTHER_NAMES.get(name, "it is no part of a layer"), get_close_matches(name, MODULES, 1, 0.5)
            raise ValueError(f"{called} has {name!r}, wanted some of {', '.join(map(repr, MODULES))}, as {why}; "
                             f"{f'pass {close[0]!r}' if close else 'leave it out'}")
    return tuple(name for name in MODULES if name in names)


def _listed(called: str, value: Any) -> list[str]:
    """Return the names in a string with commas, in a member of an enum, or in an iterable of them."""
    items = [value] if isinstance(value, (str, Enum)) else value
    if not isinstance(items, Iterable):
        raise TypeError(f"{called} is {found(value)}; wanted names of modules; pass a tuple of str")
    listed: list[str] = []
    for item in map(_plain, items):
        if not isinstance(item, str):
            raise TypeError(f"{called} holds {found(item)}; wanted names of modules; pass a tuple of str")
        listed += [name.strip() for name in item.split(",") if name.strip()]
    return list(dict.fromkeys(listed))


def _plain(value: Any) -> Any:
    """Return the name of an enum's member, whose number differs between versions of Megatron-LM; return others
    unchanged.
    """
    return value.name if isinstance(value, Enum) else value


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else as_count(name, value)


CHECKS: dict[str, Callable[[str, Any], Any]] = {  # of all fields but the modules, which have former values
    "impl": lambda name, value: as_choice(name, _plain(value), SCOPES),
    "inference_scope": lambda name, value: (
        None if value is None else as_choice(name, _plain(value), ("none", "layer", "block"))
    ),
    "max_packed_seqs": _count_or_none,
    "max_tokens_per_rank": _count_or_none,
    "warmup_steps": lambda name, value: as_count(name, value, "leave it out for 3", at_least=0),
    "on_overflow": lambda name, value: as_choice(name, value, ON_OVERFLOW),
    "single_pool": as_bool,
    "max_packed_nodes": _count_or_none,
}
