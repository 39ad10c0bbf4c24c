"""The example's modules are imported by name, as its programs do: its folder goes on the path, here alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "bytelm"))
