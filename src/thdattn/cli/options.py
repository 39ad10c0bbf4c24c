"""Options that several commands take: the engine, the lengths of documents, and the file of a picture."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdattn.arguments import shown
from thdattn.install import remedy

Lengths = NDArray[np.int64]

PICTURES = (".png", ".pdf", ".svg")
INLINE = re.compile(r"(?:(\d{1,7})x)?(\d{1,9})")  # one part between commas: a length, or NxL


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add --engine."""
    parser.add_argument("--engine", choices=("auto", "cuda", "reference"), default="auto",
                        help="cuda, reference (NumPy), or auto: cuda where a GPU is usable (default: auto)")


def add_documents(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add --lengths and --data, of which a user passes one; `document_lengths` reads them.

    Args:
        default: of --lengths; None: the user has to pass one of the two.
    """
    source = parser.add_mutually_exclusive_group(required=default is None)
    source.add_argument("--lengths", metavar="LENGTHS", default=default,
                        help="tokens of each document, as in 24576,8x1024, or a file with one number per line"
                             + (f" (default: {default})" if default else ""))
    source.add_argument("--data", type=Path, metavar="DIR",
                        help="take the files in this folder and below it as documents; one byte is one token")


def document_lengths(arguments: argparse.Namespace) -> Lengths:
    """Read the lengths that --lengths or --data gives.

    Returns:
        (num_documents,) int64, tokens of each document, all >= 1: empty documents are left out.

    Raises:
        ValueError: text that is neither lengths nor a file, a file or folder without documents, or a wrong line.
        OSError: a file that cannot be read.
    """
    if arguments.data is not None:
        return _lengths_below(arguments.data)
    text, lengths = arguments.lengths, list[int]()
    for part in text.split(","):
        found = INLINE.fullmatch(part.strip())
        if found:
            lengths += int(found[1] or 1) * [int(found[2])]
        elif os.path.isfile(text):
            return _lengths_in(Path(text))
        else:
            raise ValueError(f"--lengths has {shown(part)}, wanted lengths with commas between, NxL for N times L, or "
                             f"an existing file with one length per line; pass them as in 24576,8x1024")
    if not any(lengths):
        raise ValueError(f"--lengths is {shown(text)}, wanted at least one token; pass the tokens of every document")
    return np.array([length for length in lengths if length], np.int64)


def _lengths_in(file: Path) -> Lengths:
    """Read a file of integers; a first line without digits is a heading, and # begins a comment."""
    lengths = []
    with file.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.split("#")[0].strip().rstrip(",")
            if text and not (number == 1 and not any(map(str.isdigit, text))):
                lengths.append(_length(text, f"line {number} of --lengths {file}"))
    if not any(lengths):
        raise ValueError(f"--lengths is {file}, which holds no length above 0, wanted one per line; "
                         f"pass the tokens of every document")
    return np.array([length for length in lengths if length], np.int64)


def _length(text: str, where: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(f"{where} is {shown(text)}, wanted one integer from 0 to 10**12 - 1; "
                         f"pass the tokens of one document per line")
    return int(text)


def _lengths_below(folder: Path) -> Lengths:
    """Return the sizes of a folder's files in the order of their names, without empty and hidden ones."""
    if not folder.is_dir():
        raise ValueError(f"--data is {folder}, wanted a folder that exists; pass one with documents")
    files = sorted(path for path in folder.rglob("*")
                   if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts))
    sizes = np.array([path.stat().st_size for path in files], np.int64)
    if not sizes.any():
        raise ValueError(f"--data is {folder}, which holds no file that is not empty or hidden, wanted at least one; "
                         f"pass a folder with documents")
    return sizes[sizes > 0]


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """Check that the picture of an option can be drawn, before anything is computed; None is no picture.

    Raises:
        ValueError: a name of another kind of file, a folder that does not exist, or Matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{option} is {path}, wanted a name that ends in one of {', '.join(PICTURES)}; rename it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} is {path}, wanted a file in a folder that exists; make {path.parent} first, or "
                         f"name another place")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs Matplotlib; install it with: {remedy('examples')}")
