"""The configuration of CUDA graphs: what is accepted, migrated and refused, from Python and from a command line."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import pickle
import re
import warnings
from contextlib import ExitStack

import numpy as np
import pytest
from wrong_values import NAN, refuses, table

from thdattn import graphs
from thdattn.graphs import (
    CudaGraphConfig,
    CudaGraphModule,
    CudaGraphScope,
    InferenceCudaGraphScope,
    add_arguments,
    from_arguments,
    normalize,
)

MEGATRON = {  # its enums, whose members have numbers there
    "CudaGraphScope": ["full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba",
                       "full_iteration_inference"],
    "InferenceCudaGraphScope": ["none", "layer", "block"],
}
Numbers = enum.Enum("Numbers", MEGATRON["CudaGraphScope"])
Text = enum.Enum("Text", {"attn": "a"}, type=str)

DEFAULTS = {
    "impl": "none", "modules": (), "inference_scope": "none", "max_packed_seqs": None, "max_tokens_per_rank": None,
    "warmup_steps": 3, "on_overflow": "eager", "single_pool": True, "max_packed_nodes": None,
}
LOCAL = {"impl": "local", "inference_scope": "layer"}
AS_LOCAL = {"impl": "local", "inference_scope": "none"}  # what transformer_engine becomes
WHOLE = {"impl": "full_iteration", "inference_scope": "none"}

SCOPE = "cuda_graph_scope is deprecated, use cuda_graph_modules instead"
ENABLE = "enable_cuda_graph is deprecated, use cuda_graph_impl='local' instead"
EXTERNAL = "external_cuda_graph is deprecated, use cuda_graph_impl='transformer_engine' instead"
FULL = "cuda_graph_modules='full' is deprecated, use cuda_graph_modules='' instead"
ITERATION = "cuda_graph_modules='full_iteration' is deprecated, use cuda_graph_impl='full_iteration' instead"
BLOCK = "use cuda_graph_impl='local' with inference_cuda_graph_scope='block' instead"
INFERENCE = f"cuda_graph_modules='full_iteration_inference' is deprecated, {BLOCK}"
RUNS_AS_LOCAL = ("cuda_graph_impl='transformer_engine' captures per layer and runs as cuda_graph_impl='local' without "
                 "graphs for inference")


def options(impl=None, modules=None, scope=None, **others):
    """Return options by short names."""
    return {"cuda_graph_impl": impl, "cuda_graph_modules": modules, "inference_cuda_graph_scope": scope, **others}


def old(scope, impl=None, **others):
    return options(impl, cuda_graph_scope=scope, **others)


ACCEPTED = {  # options -> fields that are not the default
    "nothing": ({}, {}),
    "none": (options("none", scope="none"), {}),
    "none, modules idle": (options("none", "attn"), {"modules": ("attn",)}),
    "local": (options("local"), LOCAL),
    "local, layer": (options("local", scope="layer"), LOCAL),
    "local, block": (options("local", scope="block"), {**LOCAL, "inference_scope": "block"}),
    "full_iteration": (options("full_iteration"), WHOLE),
    "full_iteration, none": (options("full_iteration", [], "none"), WHOLE),
    "no modules, empty texts": (options("local", ["", " , "]), LOCAL),
    "modules in another order": (options("local", "mamba, mlp,attn"), {**LOCAL, "modules": ("attn", "mlp", "mamba")}),
    "modules twice": (options("local", ["mlp", "attn", "mlp"]), {**LOCAL, "modules": ("attn", "mlp")}),
    "one enum": (options("local", CudaGraphModule.mlp), {**LOCAL, "modules": ("mlp",)}),
    "enums of numbers": (options("local", [Numbers.mlp]), {**LOCAL, "modules": ("mlp",)}),
    "an enum of texts": (options("local", Text.attn), {**LOCAL, "modules": ("attn",)}),
    "enums and texts": (
        options("local", ["mlp,mamba", CudaGraphModule.attn]), {**LOCAL, "modules": ("attn", "mlp", "mamba")}
    ),
    "inference scope as an enum": (
        options("local", scope=InferenceCudaGraphScope.block), {**LOCAL, "inference_scope": "block"}
    ),
    "former flags unset": (options("local", enable_cuda_graph=False, external_cuda_graph=False), LOCAL),
    "max_packed_seqs": (options("local", cuda_graph_max_packed_seqs=64), {**LOCAL, "max_packed_seqs": 64}),
    "warmup_steps": (options("full_iteration", cuda_graph_warmup_steps=0), {**WHOLE, "warmup_steps": 0}),
}
MIGRATED = {  # options -> fields, texts of the warnings
    "enable_cuda_graph": ({"enable_cuda_graph": True}, LOCAL, [ENABLE]),
    "enable_cuda_graph, block": (
        options(scope="block", enable_cuda_graph=True), {**LOCAL, "inference_scope": "block"}, [ENABLE]
    ),
    "external_cuda_graph": ({"external_cuda_graph": True}, AS_LOCAL, [EXTERNAL, RUNS_AS_LOCAL]),
    "transformer_engine": (options("transformer_engine"), AS_LOCAL, [RUNS_AS_LOCAL]),
    "transformer_engine, full": (options("transformer_engine", "full"), AS_LOCAL, [FULL, RUNS_AS_LOCAL]),
    "scope mamba": (old(CudaGraphScope.mamba, "local"), {**LOCAL, "modules": ("mamba",)}, [SCOPE]),
    "scope empty": (old([], "local"), LOCAL, [SCOPE]),
    "scope full": (old("full", "local"), LOCAL, [SCOPE, FULL.replace("cuda_graph_modules", "cuda_graph_scope", 1)]),
    "scope full_iteration": (
        old("full_iteration"), WHOLE, [SCOPE, ITERATION.replace("cuda_graph_modules", "cuda_graph_scope")]
    ),
    "scope full_iteration_inference": (
        old("full_iteration_inference", enable_cuda_graph=True), {**LOCAL, "inference_scope": "block"},
        [ENABLE, SCOPE, INFERENCE.replace("cuda_graph_modules", "cuda_graph_scope")],
    ),
    "full": (options("local", "full"), LOCAL, [FULL]),
    "full_iteration": (options(modules="full_iteration"), WHOLE, [ITERATION]),
    "full_iteration, local": (options("local", ["full_iteration"]), WHOLE, [ITERATION]),
    "full_iteration_inference": (
        options("local", "full_iteration_inference"), {**LOCAL, "inference_scope": "block"}, [INFERENCE]
    ),
    "full_iteration_inference, attn": (
        options("local", ["attn", CudaGraphScope.full_iteration_inference]),
        {**LOCAL, "inference_scope": "block", "modules": ("attn",)}, [INFERENCE],
    ),
    "full_iteration_inference, alone": (
        options(modules="full_iteration_inference"), {**LOCAL, "inference_scope": "block"}, [INFERENCE]
    ),
    "full_iteration_inference, impl none, attn": (
        options("none", "full_iteration_inference,attn"),
        {**LOCAL, "inference_scope": "block", "modules": ("attn",)}, [INFERENCE],
    ),
}
EXPERTS = "wanted some of 'attn', 'mlp', 'mamba', as mixture of experts is not part of this package"
REFUSED = {  # options -> what the message says, both sides of a conflict
    "impl unknown": (options("global"), ["cuda_graph_impl is 'global', wanted 'none', 'local'"]),
    "module unknown": (options("local", "attn,norm"), ["cuda_graph_modules has 'norm'", "'attn', 'mlp', 'mamba'"]),
    "module by another name": (options("local", "attention"), ["cuda_graph_modules has 'attention'", "pass 'attn'"]),
    "inference scope unknown": (options("local", scope="model"), ["inference_cuda_graph_scope is 'model', wanted"]),
    "scope module_scoped": (old("module_scoped", "local"), ["cuda_graph_scope has 'module_scoped'", "removed"]),
    "moe": (options("local", "moe"), ["cuda_graph_modules has 'moe'", EXPERTS]),
    "moe_router": (options("local", ["attn", "moe_router"]), ["cuda_graph_modules has 'moe_router'", EXPERTS]),
    "moe_preprocess": (old(CudaGraphScope.moe_preprocess), ["cuda_graph_scope has 'moe_preprocess'", EXPERTS]),
    "max_packed_seqs 0": (options("local", cuda_graph_max_packed_seqs=0), ["cuda_graph_max_packed_seqs is 0, wanted"]),
    "warmup_steps -1": (options("local", cuda_graph_warmup_steps=-1), ["cuda_graph_warmup_steps is -1, wanted >= 0"]),
    "enable_cuda_graph, local": (
        options("local", enable_cuda_graph=True), ["enable_cuda_graph", "cannot be combined", "cuda_graph_impl='local'"]
    ),
    "external_cuda_graph, full_iteration": (
        options("full_iteration", external_cuda_graph=True),
        ["external_cuda_graph", "cannot be combined", "cuda_graph_impl='full_iteration'"],
    ),
    "both former flags": (
        {"enable_cuda_graph": True, "external_cuda_graph": True},
        ["enable_cuda_graph and external_cuda_graph cannot be enabled at the same time"],
    ),
    "scope and modules": (
        options("local", "attn", cuda_graph_scope="mlp"),
        ["cuda_graph_scope and cuda_graph_modules cannot be set together"],
    ),
    "full and a module": (options("local", "full,attn"), ["cuda_graph_modules", "'full' and 'attn' together"]),
    "full_iteration and a module": (
        options(modules=["attn", "full_iteration"]), ["cuda_graph_modules", "'attn' and 'full_iteration' together"]
    ),
    "two former values": (
        old("full_iteration,full_iteration_inference"),
        ["cuda_graph_scope", "'full_iteration' and 'full_iteration_inference' together"],
    ),
    "full_iteration, external_cuda_graph": (
        old("full_iteration", external_cuda_graph=True),
        ["cuda_graph_scope='full_iteration' cannot be combined with cuda_graph_impl='transformer_engine'"],
    ),
    **{
        f"{impl}, {scope}": (
            options(impl, scope=scope),
            [f"inference_cuda_graph_scope is '{scope}' with cuda_graph_impl='{impl}', wanted {wanted}"],
        )
        for impl, scope, wanted in (
            ("none", "layer", "'none'"), ("none", "block", "'none'"), ("local", "none", "'layer' or 'block'"),
            ("transformer_engine", "layer", "'none'"), ("transformer_engine", "block", "'none'"),
            ("full_iteration", "layer", "'none'"), ("full_iteration", "block", "'none'"),
        )
    },
    **{
        f"{former}, {other}": (
            options(modules=former, **{short: value for short, value in (("impl", impl), ("scope", scope)) if value}),
            [f"cuda_graph_modules='{former}' cannot be combined with {other}"],
        )
        for former, impl, scope, other in (
            ("full_iteration", "transformer_engine", None, "cuda_graph_impl='transformer_engine'"),
            ("full_iteration", "local", "layer", "inference_cuda_graph_scope='layer'"),
            ("full_iteration", None, "block", "inference_cuda_graph_scope='block'"),
            ("full_iteration_inference", "transformer_engine", None, "cuda_graph_impl='transformer_engine'"),
            ("full_iteration_inference", "full_iteration", None, "cuda_graph_impl='full_iteration'"),
            ("full_iteration_inference", "local", "layer", "inference_cuda_graph_scope='layer'"),
            ("full_iteration_inference", "local", "none", "inference_cuda_graph_scope='none'"),
        )
    },
    "full_iteration with modules": (
        options("full_iteration", "attn,mlp"),
        ["cuda_graph_modules is ('attn', 'mlp') with cuda_graph_impl='full_iteration', wanted none"],
    ),
}
FIELDS = {f"cuda_graph_{name}": name for name in DEFAULTS}  # what CudaGraphConfig takes itself
FIELDS |= {"inference_cuda_graph_scope": "inference_scope", "cuda_graph_scope": "cuda_graph_scope"}
def flag(option):
    return "--" + option.replace("_", "-")


def flags(given):
    """Return the command line of these options, None if there is none."""
    words = []
    for option, value in given.items():
        listed = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is None or value is False:
            continue
        if any(type(item) not in (str, int, bool) for item in listed):
            return None
        words += [flag(option)] + [str(item) for item in listed if item is not True]
    return words


def rows():
    """Yield every row for normalize, and those that can be typed or passed for a command line and for CudaGraphConfig.
    """
    table = {f"accepted, {name}": (given, fields, []) for name, (given, fields) in ACCEPTED.items()}
    table |= {f"migrated, {name}": row for name, row in MIGRATED.items()}
    table |= {f"refused, {name}": (given, None, said) for name, (given, said) in REFUSED.items()}
    for name, row in table.items():
        yield pytest.param("python", *row, id=f"python: {name}")
        if row[0].keys() <= FIELDS.keys():
            yield pytest.param("fields", *row, id=f"fields: {name}")
        if flags(row[0]) is not None:
            yield pytest.param("flags", *row, id=f"flags: {name}")


@pytest.mark.parametrize(("front", "given", "fields", "said"), [*rows()])
def test_options_are_accepted_or_migrated_with_warnings_or_refused(front, given, fields, said, capsys):
    parser = argparse.ArgumentParser("train.py")
    add_arguments(parser)
    named = {"python": str, "flags": flag, "fields": FIELDS.get}[front]
    said = [re.sub(r"\b\w*cuda_graph\w*\b", lambda option: named(option[0]), text) for text in said]
    with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
        warnings.simplefilter("always")
        if fields is None:
            error = stack.enter_context(pytest.raises(SystemExit if front == "flags" else ValueError))
        config = {
            "python": lambda: normalize(**given),
            "flags": lambda: from_arguments(parser, parser.parse_args(flags(given))),
            "fields": lambda: CudaGraphConfig(**{named(option): x for option, x in given.items() if x is not None}),
        }[front]()
    if fields is None:
        *_, text = capsys.readouterr().err.splitlines() if front == "flags" else [str(error.value)]
        assert front != "flags" or (error.value.code == 2 and text.startswith("train.py: error: --"))
        assert all(part in text for part in said) and ";" in text, f"both sides and a remedy: {text}"
        assert caught == [], "an error comes without warnings"
    else:
        assert dataclasses.asdict(config) == {**DEFAULTS, **fields}
        assert [str(warning.message) for warning in caught] == said
        assert {warning.filename for warning in caught} <= {__file__}, "warnings point at the caller's line"
        unseen = [warning.category for warning in caught if "runs as" not in str(warning.message)]
        assert set(unseen) <= {FutureWarning}, "which users see"


@pytest.mark.parametrize("kind", MEGATRON)
def test_enums_are_those_of_megatron_and_strings_too(kind):
    made = getattr(graphs, kind)
    assert {member.name for member in made} == set(MEGATRON[kind])
    for member in made:
        name = member.name
        assert (member, hash(member), repr(member), f"{member}") == (name, hash(name), repr(name), name)
        assert member is made(member.name) is pickle.loads(pickle.dumps(member))
    assert CudaGraphConfig("local", list(CudaGraphModule)[:3]).modules == ("attn", "mlp", "mamba")


@pytest.mark.parametrize(("words", "by"), [
    ("--cuda-graph-impl local --inference-cuda-graph-scope block", "--inference-cuda-graph-scope is 'block'"),
    ("--cuda-graph-impl local --inference-cuda-graph-scope layer", "--inference-cuda-graph-scope is 'layer'"),
    ("--cuda-graph-scope full_iteration_inference", "--cuda-graph-scope is ['full_iteration_inference']"),
    ("--cuda-graph-modules attn,full_iteration_inference --cuda-graph-impl local",
     "--cuda-graph-modules is ['attn,full_iteration_inference']"),
])
def test_a_program_without_inference_refuses_its_scope_by_name(words, by, capsys):
    parser = argparse.ArgumentParser("train.py")
    add_arguments(parser)
    with pytest.raises(SystemExit) as error, warnings.catch_warnings():
        warnings.simplefilter("error")
        from_arguments(parser, parser.parse_args(words.split()), "training writes no text")
    assert error.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"train.py: error: {by}, wanted no graph for inference, as training writes no text; leave it out"
    )


@table(
    ("impl", None, TypeError, "impl is None, a NoneType; wanted 'none', 'local', 'transformer_engine' or"),
    ("impl", "te", ValueError, "impl is 'te', wanted 'none', 'local', 'transformer_engine' or 'full_iteration'; pass"),
    ("modules", None, TypeError, "modules is None, a NoneType; wanted names of modules; pass a tuple of str"),
    ("modules", ["attn", 2], TypeError, "modules holds 2, a int; wanted names of modules"),
    ("modules", b"attn", TypeError, "modules holds 97, a int; wanted names of modules"),
    ("cuda_graph_scope", 3, TypeError, "cuda_graph_scope is 3, a int; wanted names of modules; pass a tuple of str"),
    ("inference_scope", True, TypeError, "inference_scope is True, a bool; wanted 'none', 'layer' or 'block'"),
    ("inference_scope", "all", ValueError, "inference_scope is 'all', wanted 'none', 'layer' or 'block'"),
    ("max_packed_seqs", 0, ValueError, "max_packed_seqs is 0, wanted >= 1; pass a positive count"),
    ("max_packed_seqs", "64", TypeError, "max_packed_seqs is '64', a str; wanted an int"),
    ("max_packed_nodes", 0, ValueError, "max_packed_nodes is 0, wanted >= 1; pass a positive count"),
    ("max_tokens_per_rank", -1, ValueError, "max_tokens_per_rank is -1, wanted >= 1"),
    ("max_tokens_per_rank", NAN, TypeError, "max_tokens_per_rank is nan, a float; wanted an int"),
    ("warmup_steps", -1, ValueError, "warmup_steps is -1, wanted >= 0; leave it out for 3"),
    ("warmup_steps", None, TypeError, "warmup_steps is None, a NoneType; wanted an int"),
    ("on_overflow", "truncate", ValueError, "on_overflow is 'truncate', wanted 'eager' or 'error'"),
    ("single_pool", 1, TypeError, "single_pool is 1, a int; wanted True or False"),
)
def test_configuration(argument, value, kind, message):
    refuses(lambda **changed: CudaGraphConfig(**{"impl": "local", **changed}), argument, value, kind, message)


@table(
    ("cuda_graph_impl", 1, TypeError, "cuda_graph_impl is 1, a int; wanted 'none', 'local'"),
    ("cuda_graph_scope", ["attn", None], TypeError, "cuda_graph_scope holds None, a NoneType; wanted names of modules"),
    ("inference_cuda_graph_scope", 2, TypeError, "inference_cuda_graph_scope is 2, a int; wanted 'none', 'layer' or"),
    ("cuda_graph_warmup_steps", 1.5, TypeError, "cuda_graph_warmup_steps is 1.5, a float; wanted an int"),
    ("enable_cuda_graph", "no", TypeError, "enable_cuda_graph is 'no', a str; wanted True or False"),
    ("cuda_graph_retain_backward_graph", True, TypeError, "cuda_graph_retain_backward_graph is no option of CUDA"),
)
def test_normalize(argument, value, kind, message):
    refuses(normalize, argument, value, kind, message)


def test_configuration_is_immutable_hashable_and_made_of_plain_values():
    config = CudaGraphConfig("local", (x for x in ("mlp", CudaGraphModule.attn)), max_packed_seqs=np.int64(64))
    assert config == CudaGraphConfig("local", "attn,mlp", "layer", 64)
    assert hash(config) == hash(CudaGraphConfig("local", "attn,mlp", "layer", 64))
    assert (config.modules, type(config.max_packed_seqs)) == (("attn", "mlp"), int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.impl = "none"


def test_transformer_engine_warns_once_where_it_is_written_and_keeps_its_refusals():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = CudaGraphConfig("transformer_engine", "attn")
        copies = [copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)]
        changed = dataclasses.replace(copies[1], warmup_steps=1)
    (warning,) = caught
    assert (warning.filename, warning.category) == (__file__, UserWarning)
    assert str(warning.message).startswith("impl='transformer_engine' captures per layer and runs as impl='local'")
    assert copies == [config] * 3
    assert dataclasses.asdict(changed) == {**DEFAULTS, **AS_LOCAL, "modules": ("attn",), "warmup_steps": 1}
    with pytest.raises(ValueError, match="inference_scope is 'layer' with impl='transformer_engine', wanted 'none'"):
        dataclasses.replace(config, inference_scope="layer")


def test_replacing_the_impl_alone_does_not_silently_change_what_inference_does():
    with pytest.raises(ValueError, match="inference_scope is 'none' with impl='local'"):
        dataclasses.replace(CudaGraphConfig(), impl="local")
    assert dataclasses.replace(CudaGraphConfig(), impl="local", inference_scope=None) == CudaGraphConfig("local")
