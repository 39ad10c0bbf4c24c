"""Progress of a run, as a log and as a terminal show it."""

from __future__ import annotations

import re

import progress


def log_of(monkeypatch, capsys, seconds, per_step):
    """Return the log of a run of so many seconds: [seconds since the beginning] of its lines, and the lines."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = progress.Progress(int(seconds / per_step), 0, shown=True, bar=False)
    times, lines = [], []
    for number in range(int(seconds / per_step)):
        now += per_step
        shown.step(f"loss {number}")
        if printed := capsys.readouterr().err:
            times.append(now)
            lines.append(printed)
    shown.close()
    return times, [*lines, capsys.readouterr().err]


def test_log_gets_a_line_every_ten_seconds_and_after_a_minute_every_minute(monkeypatch, capsys):
    times, lines = log_of(monkeypatch, capsys, 300, 0.5)
    assert times == [10, 20, 30, 40, 50, 60, 120, 180, 240, 300]
    assert all(re.fullmatch(r"step \d+ of 600, \d\d:\d\d passed, .* to go, loss \d+\n", line) for line in lines)
    assert lines[-1].startswith("step 600 of 600") and lines[-1].endswith("loss 599\n")
    times, (line,) = log_of(monkeypatch, capsys, 3, 1)
    assert not times and line.startswith("step 3 of 3"), "the last line comes however short the run"


def test_ranks_that_do_not_show_print_nothing(capsys):
    quiet = progress.Progress(3, 0, shown=False, bar=True)
    quiet.step("loss 1")
    quiet.say("step 1")
    quiet.close()
    assert capsys.readouterr() == ("", "")


def test_bar_behind_a_launcher_has_the_width_that_columns_says(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    shown = progress.Progress(40, 0, shown=True, bar=True)
    for _ in range(40):
        shown.step("loss 1.234, 12,345 tokens/s, padding 1.2%, and more")
    shown.say("validation")
    shown.close()
    said = capsys.readouterr()
    bars = [line for line in re.split(r"[\r\n]+", said.err) if "/40 |" in line]
    assert bars[-1].startswith("40/40 |")
    assert max(len(bar.rstrip()) for bar in bars) <= 70
    assert "validation" in said.err and not said.out, "one pipe keeps the order"
