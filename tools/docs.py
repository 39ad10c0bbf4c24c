"""Write the API reference into a folder, from the docstrings: docs.py FOLDER [MODULE...]

pdoc writes out what ArrayLike and DTypeLike of NumPy stand for, which takes lines; here they keep their names.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pdoc
from numpy.typing import ArrayLike, DTypeLike, NDArray

MODULES = ("thdattn", "thdattn.costs", "thdattn.oracle", "thdattn.torch")
NAMES: dict[str, Any] = {"ArrayLike": ArrayLike, "ArrayLike | None": ArrayLike | None, "DTypeLike": DTypeLike,
                         "DTypeLike | None": DTypeLike | None, "NDArray": NDArray[Any]}


def main() -> int:
    folder, *modules = sys.argv[1:]
    write(Path(folder), *(modules or MODULES))
    print(f"wrote {folder}/index.html")
    return 0


def write(folder: Path, *modules: str) -> None:
    """Write a page per module, and an index."""
    pdoc.render.configure(docformat="google")
    with mock.patch.object(inspect, "formatannotation", short), mock.patch.object(pdoc.doc, "formatannotation", short):
        pdoc.pdoc(*modules, output_directory=folder)


def short(annotation: object, *_: object, **__: object) -> str:
    """Return the text of an annotation, with names of types for what they stand for."""
    text = _text(annotation)
    for name, kind in NAMES.items():
        text = text.replace(_text(kind), name)
    return text


def _text(annotation: object) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        whole = f"{annotation.__module__}.{annotation.__qualname__}"
    else:
        whole = repr(annotation)
    return re.sub(r"\b(typing|collections\.abc|builtins)\.", "", whole)


if __name__ == "__main__":
    sys.exit(main())
