"""Ctrl-C and other signals: they end a run after a micro-batch, with a checkpoint of the last whole step, or at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager

import checkpoint
import interrupt
import launch
import pytest
from faults import is_running
from programs import MISBEHAVE, TRAIN, lines_of, small


@contextmanager
def running(ranks, words):
    """Start a program for signals; kill it at the end if it still runs."""
    launcher = [*launch.mpiexec(ranks), sys.executable, "-m", "mpi4py"] if ranks > 1 else [sys.executable]
    with launch.start([*launcher, *map(str, words)]) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


PATIENCE = 120  # seconds that a busy machine may take for what follows at once elsewhere


def wait_until(condition, process):
    """Wait until something has happened that a program does on its way."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.05)


def press_until_the_end(process, send):
    """Send Ctrl-C again and again, as a busy process may hear a press so late that the next one counts as the same.

    Return what it has printed.
    """
    limit = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < limit:
        send()
        time.sleep(interrupt.ONE_PRESS + 0.2)
    return process.communicate(timeout=PATIENCE)


def num_lines(metrics):
    return metrics.exists() and metrics.read_text().count("\n")


def process_ids(folder, ranks, process):
    """Return the process ids of ranks that misbehave.py has started and that wait."""
    files = [folder / str(rank) for rank in range(ranks)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), process)
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_a_signal_to_launcher_and_ranks_stops_all_with_a_checkpoint(documents, tmp_path, number):
    """A terminal sends Ctrl-C like this, and a scheduler SIGTERM."""
    if launch.launcher.is_open_mpi(launch.mpiexec(2)[0]):
        pytest.skip("Open MPI's launcher kills the ranks a moment after either")
    metrics = tmp_path / "run.jsonl"
    words = small(documents, steps=100_000, checkpoint=tmp_path, metrics=metrics, val_every=100_000)
    with running(2, [TRAIN, *words]) as process:
        wait_until(lambda: num_lines(metrics) > 5, process)
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert f"stopped after step {checkpoint.load(tmp_path).step}" in output
    assert lines_of(metrics)[-1]["step"] == checkpoint.load(tmp_path).step


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_ctrl_c_ends_at_once_before_the_first_step(documents, tmp_path, ranks):
    """One rank sleeps; the other waits in MPI, where Python's own handlers do not run, and it alone is interrupted."""
    with running(ranks, [MISBEHAVE, "wait", "0", "0", *small(documents, metrics=tmp_path / "run.jsonl")]) as process:
        last = process_ids(tmp_path, ranks, process)[-1]
        for _ in range(2):  # as launcher and terminal may both deliver one press
            os.kill(last, signal.SIGINT)
        time.sleep(interrupt.ONE_PRESS + 0.5)
        assert process.poll() is None, "the first press waits for the end of a micro-batch"
        _, errors = press_until_the_end(process, lambda: os.kill(last, signal.SIGINT) if is_running(last) else None)
    assert process.returncode == 130 if ranks == 1 else process.returncode != 0
    assert "Traceback" not in errors
    if ranks == 1:
        assert "ending after this micro-batch; Ctrl-C again ends at once" in errors and "ended at once" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.exhaustive)])
def test_other_signals_only_ever_ask_for_the_end_after_a_micro_batch(documents, tmp_path, number):
    """Launchers and schedulers send them, some again and again until the process has ended."""
    metrics = tmp_path / "run.jsonl"
    words = small(documents, steps=100_000, checkpoint=tmp_path, metrics=metrics, val_every=100_000)
    with running(1, [TRAIN, *words]) as process:
        wait_until(lambda: num_lines(metrics) > 5, process)
        limit = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < limit:
            process.send_signal(number)
            time.sleep(0.01)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert f"stopped after step {checkpoint.load(tmp_path).step}, --resume goes on" in output
