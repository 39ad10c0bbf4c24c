"""Checkpoint: one file with everything that a run needs to go on, or a sampler to start: checkpoint.npz, read by NumPy.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from data import Position
from numpy.typing import NDArray
from sizes import Config

NAME = "checkpoint.npz"


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after a step.

    config: the model's shape. step: number of steps done. position: where the data goes on.
    settings: options that must not change if the run is to go on as if never interrupted; JSON's types.
    weights: flat, as Model.weights. optimizer: name -> array, as AdamW.state.
    validated: False if a validation after this step was due and is still to be made.
    """

    config: Config
    step: int
    position: Position
    settings: dict[str, Any]
    weights: NDArray[Any]
    optimizer: dict[str, NDArray[Any]]
    validated: bool = True


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of a folder, and make the folder if it is missing.

    The file is written beside the old one and replaces it when it is complete. So there is a whole file whenever the
    program or the machine stops.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "config": asdict(checkpoint.config), "step": checkpoint.step, "position": checkpoint.position,
        "settings": checkpoint.settings, "validated": checkpoint.validated,
    }
    arrays: dict[str, Any] = {f"optimizer.{name}": array for name, array in checkpoint.optimizer.items()}
    arrays |= {"about": json.dumps(about), "weights": checkpoint.weights}
    unfinished = folder / f"{NAME}.{os.getpid()}.unfinished"
    try:
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / NAME)
    finally:
        unfinished.unlink(missing_ok=True)


def load(folder: Path) -> Checkpoint:
    """Return the checkpoint of a folder, with arrays on the host.

    Raises:
        ValueError: there is none, or a file that is no checkpoint.
    """
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist, wanted a checkpoint; train with --checkpoint {folder} first")
    try:
        with np.load(path) as file:
            arrays = dict(file)
        about = json.loads(str(arrays.pop("about")))
        return Checkpoint(
            Config(**about["config"]), about["step"], Position(*about["position"]), about["settings"],
            arrays.pop("weights"), {name.removeprefix("optimizer."): array for name, array in arrays.items()},
            about.get("validated", True),
        )
    except (zipfile.BadZipFile, EOFError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}), wanted a checkpoint of this version of the "
            f"example; delete it and train again"
        ) from error
