"""Install commands for missing libraries, which work for the place that this package was installed from."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

DEVICE, DRIVER = "/dev/nvidia0", "/proc/driver/nvidia"
FOLDER = Path(__file__).resolve().parent


def remedy(extra: str) -> str:
    """Return the command that adds an extra of pyproject.toml ("cuda13", "mpich", ...) to this installation.

    For a clone the command names the clone, so that it works in any directory. Otherwise it names the origin that pip
    recorded (PEP 610, direct_url.json), unless that was an index.
    """
    clone = FOLDER.parents[1]
    if FOLDER.parent.name == "src" and (clone / "pyproject.toml").exists():
        return f'pip install -e "{clone}[{extra}]"'
    origin = _origin()
    return f'pip install "thdattn[{extra}] @ {origin}"' if origin else f'pip install "thdattn[{extra}]"'


def expects_gpu() -> bool:
    """Tell whether the user expects a GPU: this machine has an NVIDIA device, or CUDA_VISIBLE_DEVICES is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return bool(visible) or (visible is None and any(Path(path).exists() for path in (DEVICE, DRIVER)))


def _origin() -> str:
    """Return the URL that this package was installed from, as pip takes it; empty if from an index."""
    try:
        kept = json.loads(metadata.distribution("thdattn").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # copied somewhere by hand
        return ""
    url: str = kept.get("url", "")
    version_control = kept.get("vcs_info", {})
    return f"{version_control['vcs']}+{url}@{version_control['commit_id']}" if version_control else url
