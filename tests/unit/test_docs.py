"""API reference: every public name has a page and a docstring that explains it and its parameters."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import pytest

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
MODULES = ["thdattn", "thdattn.comm", "thdattn.costs", "thdattn.graphs", "thdattn.oracle",
           "thdattn.timeline", pytest.param("thdattn.torch", marks=NEEDS_TORCH)]


def public(module):
    """Return {name: object} of what a module offers: its __all__, else what it defines itself."""
    names = getattr(module, "__all__", [n for n, x in vars(module).items() if _defined_in(module, x)])
    return {n: getattr(module, n) for n in names if not n.startswith("_") and not inspect.ismodule(getattr(module, n))}


def members(kind):
    """Return {name: function or property} of the public methods and properties that a class defines."""
    found = {name: inspect.getattr_static(kind, name) for name in vars(kind) if not name.startswith("_")}
    return {name: x for name, x in found.items()
            if isinstance(x, (property, classmethod, staticmethod)) or inspect.isfunction(x) or hasattr(x, "func")}


def attributes(kind):
    """Return the public fields and instance attributes of a class, from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    fields = [node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)]
    init = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    stored = [node for node in ast.walk(init[0]) if isinstance(node, ast.Attribute)] if init else []
    mine = [node.attr for node in stored if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"]
    return {name for name in (*fields, *mine) if not name.startswith("_")}


def parameters(function):
    """Return the public named parameters; none if the docstring says where they are explained."""
    if re.search(r"\b[Ss]ee (there|\w+\.\w+)", function.__doc__ or ""):
        return set()
    if not callable(function):
        return set()
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    named = {x.name for x in found if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
    return {name for name in named - {"self", "cls"} if not name.startswith("_")}


def _defined_in(module, x):
    return (inspect.isclass(x) or inspect.isroutine(x)) and x.__module__ == module.__name__


def _lacking(names, text):
    """Return the names that a docstring does not mention."""
    return sorted(name for name in names if not re.search(rf"\b{name}\b", text or ""))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_explained(name):
    module = importlib.import_module(name)
    assert module.__doc__
    missing = []
    for label, x in public(module).items():
        if not inspect.isclass(x):
            missing += [f"{label}: {lacks}" for lacks in _lacking(parameters(x), x.__doc__)]
            continue
        said = " ".join(base.__doc__ or "" for base in x.__mro__ if base.__module__.startswith("thdattn"))
        missing += [f"{label}.{lacks}" for lacks in _lacking(attributes(x), said)]
        if "__init__" in vars(x) and "made by" not in said:
            missing += [f"{label}: {lacks}" for lacks in _lacking(parameters(x.__init__), said)]
        for method, member in members(x).items():
            if not inspect.getdoc(getattr(x, method)):
                missing.append(f"{label}.{method}")
            if inspect.isfunction(member):
                missing += [f"{label}.{method}: {lacks}"
                            for lacks in _lacking(parameters(member), inspect.getdoc(getattr(x, method)) + said)]
    assert missing == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Make the reference with the program that `make docs` runs, and return its folder."""
    pytest.importorskip("pdoc")
    import docs

    folder = tmp_path_factory.mktemp("docs")
    torch = importlib.util.find_spec("torch") is not None
    docs.write(folder, *(name for name in docs.MODULES if torch or name != "thdattn.torch"))
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_stands_in_the_pages(name, pages):
    page = (pages / Path(*name.split("."))).with_suffix(".html").read_text()
    anchors = set(re.findall(r'id="([\w.]+)"', page))
    wanted = set()
    for label, x in public(importlib.import_module(name)).items():
        wanted.add(label)
        if inspect.isclass(x):
            wanted |= {f"{label}.{member}" for member in members(x)}  # attributes stand in the class's docstring
    assert wanted - anchors == set()


@pytest.mark.parametrize("name", MODULES)
def test_signatures_in_the_pages_name_the_types_of_numpy(name, pages):
    page = (pages / Path(*name.split("."))).with_suffix(".html").read_text()
    signatures = " ".join(re.findall(r'<div class="attr[^"]*">(.*?)</div>', page, re.DOTALL))
    assert "_typing" not in re.sub("<[^>]+>", "", signatures)


def named(function):
    """Return the classes of this package that the annotations of a function name."""
    hints = inspect.unwrap(function).__annotations__.values()
    names = {name for hint in hints for name in re.findall(r"\w+", str(hint))}
    found = (getattr(inspect.unwrap(function), "__globals__", {}).get(name) for name in names)
    return {x for x in found if inspect.isclass(x) and x.__module__.startswith("thdattn.")}


@pytest.mark.parametrize("name", MODULES)
def test_every_type_in_a_public_signature_is_public(name):
    offered = {id(x) for one in ("thdattn", "thdattn.comm", "thdattn.costs", "thdattn.graphs", "thdattn.oracle",
                               "thdattn.timeline")
               for x in public(importlib.import_module(one)).values()}
    hidden = set()
    for label, x in public(importlib.import_module(name)).items():
        methods = [getattr(m, "__func__", m) for m in members(x).values()] if inspect.isclass(x) else [x]
        hidden |= {f"{label}: {kind.__qualname__}" for function in methods if inspect.isfunction(function)
                   for kind in named(function) if id(kind) not in offered}
    assert hidden == set()
