"""Programs for ranks: tests start every scenario. Else the claim of one is lost, and nothing fails."""

from __future__ import annotations

import re

import pytest
from launch import RANKS

PROGRAMS = {path.stem: found[1] for path in sorted(RANKS.glob("*.py"))
            if (found := re.search(r"^SCENARIOS\b.* = \{\n(.*?)\n\}", path.read_text(), re.MULTILINE | re.DOTALL))}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_scenario_is_started_by_a_test(program):
    """By its name, or by all names of the table."""
    texts = [path.read_text() for path in RANKS.parents[1].glob("*/test_*.py")]
    tests = "\n".join(text for text in texts if program in text)
    scenarios = re.findall(r'"([\w-]+)":', PROGRAMS[program])
    never = [name for name in scenarios if not re.search(rf'[",]{name}[",]', tests)]
    assert scenarios and (never == [] or f"{program}.SCENARIOS" in tests)
