"""The example's modules are imported by name, as its programs do: its folders go on the path, here alone."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "bytelm"), str(EXAMPLES)]
