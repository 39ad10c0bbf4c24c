"""Measurements of a run that do not make the GPU wait: times, copies of numbers to the host, and the record."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from model import Model

Array = Any
Lines = list[dict[str, Any]]
Result = TypeVar("Result")

# Dense bfloat16 operations per second, from NVIDIA's data sheets, by a part of the GPU's name.
PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12, "A100": 312e12}


class Clock:
    """Source of marks in time: of the host, or of the GPU's current stream, reached when all work before is done."""

    def __init__(self, model: Model) -> None:
        self._xp = None if model.layers.xp is np else model.layers.xp

    def mark(self) -> Any:
        """Return a mark of now."""
        if self._xp is None:
            return time.perf_counter()
        event = self._xp.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Wait until a mark is reached."""
        if self._xp is not None:
            mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that have been reached."""
        return float(end - begin if self._xp is None else self._xp.cuda.get_elapsed_time(begin, end) / 1e3)


class AttentionMeter:
    """Timer of a model's attention, where it is called and not replayed.

    The time includes waits for other ranks, but no communication that overlaps other work of the model.
    """

    def __init__(self, model: Model, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        for attention in model.attentions:
            for name in ("gather", "forward"):
                setattr(attention, name, self._timed(getattr(attention, name)))
            attention.start_backward = self._both_timed(attention.start_backward)  # type: ignore[method-assign]

    def take(self) -> list[tuple[Any, Any]]:
        """Return the (begin, end) marks of this rank since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def _timed(self, function: Callable[..., Result]) -> Callable[..., Result]:
        def timed(*args: Any, **kwargs: Any) -> Result:
            begin = self._clock.mark()
            result = function(*args, **kwargs)
            self._spans.append((begin, self._clock.mark()))
            return result

        return timed

    def _both_timed(self, start_backward: Callable[..., tuple[Array, Callable[[], Any]]]) -> Callable[..., Any]:
        """Time start_backward and the function for dk and dv that it returns."""
        start = self._timed(start_backward)

        def timed(*args: Any) -> tuple[Array, Callable[[], Any]]:
            dq, dk_dv = start(*args)
            return dq, self._timed(dk_dv)

        return timed


def copy_to_host(x: Array) -> Callable[[], np.ndarray]:
    """Start to copy a small array to the host, and return a function that waits for that copy alone."""
    if isinstance(x, np.ndarray):
        copy = x.copy()
        return lambda: copy
    import cupy
    import cupyx

    pinned = cupyx.empty_pinned(x.shape, x.dtype)
    x.get(out=pinned, blocking=False)
    arrived = cupy.cuda.Event(disable_timing=True)
    arrived.record()

    def wait() -> np.ndarray:
        arrived.synchronize()
        return np.array(pinned)

    return wait


def peak_flops(model: Model) -> float | None:
    """Return the bfloat16 operations per second of this rank's GPU; None without a GPU, or for an unknown one."""
    if model.layers.xp is np:
        return None
    device = model.layers.xp.cuda.runtime.getDevice()
    name = model.layers.xp.cuda.runtime.getDeviceProperties(device)["name"].decode()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class Record:
    """Lines of a run, one dictionary each, in memory and in a JSONL file.

    Args:
        path: the file, or None.
        steps: for a resumed run: keep the lines of so many steps of the file; None: a new run.

    Raises:
        ValueError: the file holds another run, or other contents.
    """

    def __init__(self, path: Path | None, steps: int | None) -> None:
        self.lines: Lines = []
        self._file = None
        if not path:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if steps is not None and path.is_file():
            self.lines = [line for line in read("--metrics", path) if line["step"] <= steps]
            unfinished = path.with_name(f"{path.name}.unfinished")
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
            unfinished.replace(path)
        elif path.exists() and path.stat().st_size:
            raise ValueError(
                f"--metrics is {path}, which holds what another run wrote, wanted a new file; name one, delete this "
                f"one, or pass --resume to go on with that run"
            )
        self._file = path.open("a", buffering=1)

    def add(self, **line: Any) -> None:
        """Add a line, with numbers to six digits; None means that a number is unknown."""
        line = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in line.items()}
        self.lines.append(line)
        if self._file:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file:
            self._file.close()


def plot(path: Path, lines: Lines, title: str, beside: Mapping[str, Lines] | None = None) -> None:
    """Draw bits per byte over steps: every step, their running mean, and the validation.

    beside: name -> lines of other runs, of which it draws the running mean and the validation.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps, training = _column(lines, "bits_per_byte")
    width = len(training) // 40  # steps per mean, of other runs too
    axes.plot(steps, training, color="#66ccee", linewidth=0.6 if width > 1 else 1.6, label="training, every step")
    colours = [("#4477aa", "#ee6677"), ("#999999", "#444444"), ("#88bb88", "#228833"), ("#ddbb77", "#aa7722")]
    curves = [("", lines), *((f"{name}: ", other) for name, other in (beside or {}).items())]
    for (name, each), (of_mean, of_validation) in zip(curves, itertools.cycle(colours), strict=False):
        steps, training = _column(each, "bits_per_byte")
        if 1 < width <= len(training):
            mean = np.convolve(training, np.full(width, 1 / width), "valid")
            label = f"{name}training, mean of {width} steps"
            axes.plot(steps[width - 1 :], mean, color=of_mean, linewidth=1.6, label=label)
        steps, validation = _column(each, "validation_bits_per_byte")
        label = f"{name}validation, {validation[-1]:.2f} in the end" if len(validation) else f"{name}validation"
        axes.plot(steps, validation, "o-", color=of_validation, markersize=4, label=label)
    axes.set_xlabel("steps")
    axes.set_ylabel("bits per byte")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def read(option: str, path: Path) -> Lines:
    """Read the complete lines of a file; a killed run may have written a part of the last one.

    Raises:
        ValueError: the file cannot be read, or has other contents.
    """
    try:
        *texts, _ = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise ValueError(f"{option} is {path}, which cannot be read ({error.strerror}), wanted a file that --metrics "
                         f"of a run named; name that, or leave it out") from error
    lines: Lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{option} is {path}, whose line {number} is {text[:40]!r}, wanted lines that train.py wrote; name "
                f"the file that the run began with, or a new one"
            ) from error
    return lines


def _column(lines: Lines, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of the lines that have this name."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    steps, values = np.array(found, float).reshape(-1, 2).T
    return steps, values
