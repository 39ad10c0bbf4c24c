"""Puts the programs of benchmarks, which are no package, where tests find them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
