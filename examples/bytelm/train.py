"""Train a byte-level language model on packed documents, context- and data-parallel, without a framework.

    python examples/bytelm/train.py --size tiny                             one rank
    mpiexec -n 4 python -m mpi4py examples/bytelm/train.py --size tiny      four, each with a GPU if it has one
    mpiexec -n 4 python -m mpi4py examples/bytelm/train.py --cp 2           the same as two groups of two
    mpiexec -n 2 python -m mpi4py examples/bytelm/train.py --cp-comm-type a2a    two that exchange heads, not keys
    python examples/bytelm/train.py --cuda-graph-impl full_iteration        each step a CUDA graph, where there is a GPU

Read train() first and Trainer.step() second, in trainer.py: they show how a training loop uses thdattn. model.py has
the network, data.py the documents, passes.py the CUDA graphs, and grid.py the groups of ranks. All ranks make the same
micro-batches and deal them to groups of --cp ranks, by default one group of all ranks. A rank computes its own rows of
its group's micro-batches. So 4 ranks with --cp 2 train the same model as with --accumulate 2, up to rounding.

Ctrl-C (SIGINT), SIGTERM or SIGUSR1 on any rank ends all ranks after the current micro-batch, also before the first
step. With --checkpoint the last whole step is saved. A step that is one CUDA graph is always finished. A second Ctrl-C
ends all ranks at once. MPICH's mpiexec passes the first Ctrl-C on to the ranks, and kills them at the second. Open
MPI's sends SIGTERM instead and kills the ranks a moment later, half a second in version 5. A longer micro-batch is lost
then, with everything since the last checkpoint. There, send SIGUSR1 to mpiexec, which passes it on, or SIGINT to one
rank.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; NumPy reads this once, when it is imported
sys.path.append(str(Path(__file__).resolve().parents[1]))  # command_line.py

import checkpoint
import command_line
import data
import measure
from checkpoint import Checkpoint
from command_line import positive, whole
from data import Packing, Position
from grid import Grid, most_neighbours
from interrupt import Interrupt, Listener, Stop, Stopped
from progress import Progress
from sizes import SIZES, Config, forward_flops
from trainer import NATS_PER_BIT, StepResult, Trainer

import thdattn
from thdattn.arguments import INT32_MAX
from thdattn.comm.levels import Levels
from thdattn.engines.select import choose_engine
from thdattn.graphs import add_arguments, from_arguments
from thdattn.methods.select import SHARDINGS
from thdattn.sharding import STRATEGIES

LAST_LR = 0.1  # part of the highest

# Default sharding of all_gather without CUDA graphs. It seldom splits documents.
ALL_GATHER_SHARDING = "balanced"

# Defaults of a hybrid: mixers pass states from rank to rank, so each rank needs consecutive rows. To exchange heads
# balances the work of its attentions.
HYBRID_METHOD, HYBRID_SHARDING = "a2a", "contiguous"


@dataclass(frozen=True)
class Recipe:
    """Defaults of a size for training.

    longest: most tokens of a piece of a document; None: all that fits. A tiny model learns more from many short pieces
    than from one long one.
    """

    tokens: int
    longest: int | None
    steps: int
    lr: float
    val_bytes: int


RECIPES = {
    "tiny": Recipe(tokens=512, longest=256, steps=1800, lr=3e-3, val_bytes=2**15),
    "tiny-hybrid": Recipe(tokens=512, longest=256, steps=1800, lr=3e-3, val_bytes=2**15),
    "small": Recipe(tokens=16_384, longest=None, steps=2000, lr=2e-3, val_bytes=2**20),
    "base": Recipe(tokens=32_768, longest=None, steps=5000, lr=1e-3, val_bytes=2**20),
    "1b": Recipe(tokens=32_768, longest=None, steps=20_000, lr=3e-4, val_bytes=2**20),
    "1b-hybrid": Recipe(tokens=32_768, longest=None, steps=20_000, lr=3e-4, val_bytes=2**20),
}


class Reporter:
    """Output of rank 0: lines, records and pictures. Every rank calls every method alike.

    Args:
        trainer: the trainer to report on.
        args: of the command line.
        done: steps of the run that is resumed; None: a new run.
    """

    def __init__(self, trainer: Trainer, args: argparse.Namespace, done: int | None) -> None:
        self._trainer, self._args = trainer, args
        self._shown = trainer.grid.world.rank == 0
        self._peak = measure.peak_flops(trainer.model)
        self._record = measure.Record(args.metrics if self._shown else None, done)
        self._progress = Progress(args.steps, done or 0, self._shown, args.bar)

    def introduce(self, documents: Sequence[data.Document], packing: Packing, done: int) -> None:
        """Print what is going to happen."""
        model, grid, args, say = self._trainer.model, self._trainer.grid, self._args, self._progress.say
        num_bytes = sum(document.num_bytes for document in documents)
        where = f"{args.data}" if args.data else f"Python {sys.version.split()[0]}'s standard library"
        mixers = f", {model.config.num_mixers} of them mixers" if model.config.num_mixers else ""
        say(f"{args.size}: {model.weights.size:,} weights in {model.config.layers} layers{mixers}, {model.dtype}, "
            f"engine {model.attentions[0].engine!r}; ranks: {grid}, backend {grid.world.name!r}")
        if grid.cp.size > 1:
            levels = f" of {grid.cp.inner.size} neighbours" if isinstance(grid.cp, Levels) else ""
            say(f"ranks share a micro-batch by {args.cp_comm_type}{levels}, rows are {args.sharding}")
        say(f"{len(documents):,} documents of {where}, {num_bytes:,} bytes; steps of "
            f"{args.accumulate * grid.num_groups} x {packing.rows:,} tokens")
        if self._trainer.graphs.config.impl != "none":
            say(f"CUDA graphs: {self._trainer.graphs.config.impl}"
                f"{'' if self._trainer.graphs.active else ', which these ranks cannot capture: all runs eagerly'}")
        if done:
            say(f"going on after step {done}")

    def step(self, number: int, result: StepResult) -> None:
        """Record a step, and wait for its numbers.

        Raises:
            Failure: the loss, or the norm of the gradient, is infinite or not a number.
        """
        loss, norm = result.numbers().tolist()
        check_finite(f"the loss of step {number}", loss)
        check_finite(f"the norm of the gradient of step {number}", norm)
        clock, size, model = self._trainer.clock, self._trainer.grid.world.size, self._trainer.model
        seconds = clock.seconds(*result.span)
        num_targets = sum(batch.num_targets for batch in result.batches)
        num_bytes = sum(batch.num_bytes for batch in result.batches)
        num_tokens = sum(batch.batch.total_tokens for batch in result.batches)
        tokens_per_s = num_tokens / seconds
        padding = 1 - num_tokens / sum(batch.batch.total_rows for batch in result.batches)
        tflops = self._trainer.attention_tflops(result)
        flops = sum(map(model.flops, result.lengths)) if self._peak else 0
        self._record.add(
            step=number, loss=loss, bits_per_byte=loss * num_targets / max(num_bytes, 1) / NATS_PER_BIT, lr=result.lr,
            gradient_norm=norm, tokens_per_s=tokens_per_s, padding=padding, attention_tflops=tflops,
            mfu=flops / size / seconds / self._peak if self._peak else None, num_overflows=result.num_overflows,
        )
        about = [f"loss {loss:.3f} nats", f"{tokens_per_s:,.0f} tokens/s"]
        if tflops is not None:
            about.append(f"attention {f'{tflops:.0f} TFLOP/s' if tflops >= 1 else f'{1e3 * tflops:.1f} GFLOP/s'}")
        about.append(f"padding {padding:.1%}")
        if result.num_overflows:
            about.append(f"{self._trainer.passes.overflow_unit} without graphs: {result.num_overflows}")
        self._progress.step(", ".join(about))

    def validation(self, step: int, bits_per_byte: float) -> None:
        """Record a validation.

        Raises:
            Failure: it is infinite or not a number.
        """
        check_finite(f"the validation after step {step}", bits_per_byte)
        self._record.add(step=step, validation_bits_per_byte=bits_per_byte)
        self._progress.say(f"step {step:>6}   validation {bits_per_byte:.3f} bits per byte")

    def finish(self, step: int, stopped: bool) -> None:
        """Draw the curve, and print how the run ended."""
        args = self._args
        if stopped:
            onward = ", --resume goes on from there" if args.checkpoint else ""
            self._progress.say(f"stopped after step {step}{onward}")
        if overflows := self._trainer.passes.num_overflows:
            unit = self._trainer.passes.overflow_unit
            self._progress.say(f"{unit} without graphs, as a batch did not fit: {overflows}; raise "
                               f"--cuda-graph-max-packed-seqs")
        self._progress.close()
        self._record.close()
        if self._shown and args.plot:
            model, grid = self._trainer.model, self._trainer.grid
            tokens = args.accumulate * grid.num_groups * args.tokens
            title = f"{args.size}, {model.weights.size:,} weights, steps of {tokens:,} tokens, ranks: {grid}"
            measure.plot(args.plot, self._record.lines, title, other_runs(args.beside))
            self._progress.say(f"wrote {args.plot}")


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # names may be bytes of any encoding
    interrupt = Interrupt()

    def program(comm: thdattn.comm.Comm) -> int:
        interrupt.quiet = comm.rank > 0
        with command_line.together(comm):
            args = parse_arguments()
        train(comm, args, interrupt)
        return 0

    return command_line.run(program)


class Run(NamedTuple):
    """Start of a run, alike on all ranks; saved: the checkpoint that it resumes, if any."""

    trainer: Trainer
    reporter: Reporter
    training: Sequence[data.Document]
    packing: Packing
    validation: Sequence[data.MicroBatch]
    settings: dict[str, Any]
    saved: Checkpoint | None


def begin(comm: thdattn.comm.Comm, args: argparse.Namespace) -> Run:
    """Find documents and checkpoint and make the model; what fails on one rank fails here, on all."""
    config = SIZES[args.size] if args.window is None else replace(SIZES[args.size], window=args.window)
    with command_line.together(comm):
        grid = make_grid(comm, args, config)
    with command_line.together(comm):
        documents = data.find_dialogues(args.data) if args.mask_prompt else data.find_documents(args.data)
        training, held_back = data.split(documents)
        packing = Packing.of(args.tokens, grid.cp.size, args.sharding, args.longest)
        validation = data.validation_batches(held_back, packing, args.val_bytes)
        settings = settings_of(args, grid, packing, documents, choose_engine(args.engine, comm)[0].name)
        saved = saved_run(args, settings)
        if comm.rank == 0:
            check_outputs(args)
        trainer = Trainer(grid, config, args.engine, args.sharding, args.seed, args.graphs,
                          cp_comm_type=args.cp_comm_type)
        reporter = Reporter(trainer, args, saved.step if saved else None)
    with command_line.together(comm):
        comm.agree("the documents", data.fingerprint(documents))
        if saved:
            trainer.restore(saved)
    reporter.introduce(documents, packing, saved.step if saved else 0)
    return Run(trainer, reporter, training, packing, validation, settings, saved)


def train(comm: thdattn.comm.Comm, args: argparse.Namespace, interrupt: Listener) -> None:
    """Run the whole program of one rank."""
    run = begin(comm, args)
    trainer, reporter, saved = run.trainer, run.reporter, run.saved
    step, position = (saved.step, saved.position) if saved else (0, Position(0, 0))
    stop, stopped = Stop(comm, interrupt, trainer.clock), False
    must_validate = not (saved and saved.validated)  # a run that stopped before a validation makes it now
    must_save = must_validate and saved is not None
    unread: StepResult | None = None  # result of the last step, read while the GPU computes the next one

    def report() -> None:
        nonlocal unread
        if unread is not None:
            reporter.step(step, unread)
        unread = None

    def save() -> None:
        if args.checkpoint and comm.rank == 0:
            checkpoint.save(args.checkpoint, trainer.state(step, position, run.settings, not must_validate))

    trainer.pause()
    with closing(data.prefetch(steps_to_come(run, args, position, stop))) as coming:
        try:
            while True:
                if must_validate or must_save:
                    report()
                    if must_validate:
                        reporter.validation(step, trainer.bits_per_byte(run.validation, stop))
                        must_validate = False
                    if must_save:
                        save()
                    trainer.pause()
                if step == args.steps:
                    break
                batches = next(coming)
                result = trainer.step(batches, learning_rate(step, args), stop)
                report()  # of the step before
                step, position, unread = step + 1, batches[-1].after, result
                must_validate, must_save = (step == args.steps or step % every == 0
                                            for every in (args.val_every, args.save_every))
        except Stopped:
            stopped = True
            report()
            save()
    reporter.finish(step, stopped)


def steps_to_come(
    run: Run, args: argparse.Namespace, position: Position, stop: Stop
) -> Iterator[list[data.MicroBatch]]:
    """Return the micro-batches of all groups for every step from a position on; groups get equal work."""
    trainer, grid = run.trainer, run.trainer.grid
    batches = data.micro_batches(run.training, run.packing, args.seed, position)
    if grid.num_groups > 1:
        work = partial(forward_flops, trainer.model.config)
        batches = data.balance_groups(batches, run.packing, work, grid.num_groups, args.accumulate)
    size = args.accumulate * grid.num_groups
    return data.steps(batches, size, grid.mine, trainer.passes.prepare, lambda: stop.wanted)


def make_grid(comm: thdattn.comm.Comm, args: argparse.Namespace, config: Config) -> Grid:
    """Return the ranks in groups of --cp, on two levels if --cp-comm-type has a "+"; see Grid.of."""
    if "+" not in args.cp_comm_type:
        if args.cp_inner is not None:
            raise ValueError(f"--cp-inner is {args.cp_inner} and --cp-comm-type {args.cp_comm_type}, wanted one of two "
                             f"levels with that, such as a2a+all_gather; pass that, or leave --cp-inner out")
        return Grid.of(comm, args.cp)
    return Grid.of(comm, args.cp, args.cp_inner or most_neighbours(args.cp or comm.size, config))


def choose_method(args: argparse.Namespace) -> None:
    """Set --cp-comm-type and --sharding where they are not given, alike on any number of ranks.

    Raises:
        ValueError: a given value does not fit the --size.
    """
    if not SIZES[args.size].num_mixers:
        method = args.cp_comm_type = args.cp_comm_type or "all_gather"
        usual = ALL_GATHER_SHARDING if (method, args.graphs.impl) == ("all_gather", "none") else SHARDINGS[method]
        args.sharding = args.sharding or usual
        return
    args.cp_comm_type, args.sharding = args.cp_comm_type or HYBRID_METHOD, args.sharding or HYBRID_SHARDING
    one_level = [method for method in SHARDINGS if "+" not in method]
    for option, found, wanted in (("--sharding", args.sharding, [HYBRID_SHARDING]),
                                  ("--cp-comm-type", args.cp_comm_type, one_level)):
        if found not in wanted:
            raise ValueError(f"{option} is {found} and --size {args.size}, wanted {' or '.join(wanted)} with that, as "
                             f"its mixers pass states on along slices of the pack; leave {option} out, or use another "
                             f"--size")


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --cp-comm-type, --cp-inner and --sharding."""
    add = parser.add_argument
    add("--cp-comm-type", choices=list(SHARDINGS), help="exchange keys or heads in a group by this method "
        f"(default: all_gather; {HYBRID_METHOD} for a hybrid)")
    add("--cp-inner", type=positive, metavar="N", help="let N neighbours exchange heads, with a method that has a + "
        "(default: as many as heads allow)")
    add("--sharding", choices=list(STRATEGIES), help="assign rows to ranks this way (default: by --cp-comm-type; "
        f"{HYBRID_SHARDING} for a hybrid)")


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of a step: it rises linearly, then falls like a cosine to a tenth."""
    warmup = args.warmup or max(1, args.steps // 20)
    rising = min(1.0, (step + 1) / warmup)
    passed = max(0, step - warmup) / max(1, args.steps - warmup)
    falling = LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * passed)) / 2
    return float(args.lr * rising * falling)


def settings_of(
    args: argparse.Namespace, grid: Grid, packing: Packing, documents: Sequence[data.Document], engine: str
) -> dict[str, Any]:
    """Return the options that a resumed run must share with its beginning, as JSON has them.

    An engine has its own dtype. The number of ranks affects the padding, which is the same for groups of 1, 2, 4 and 8.
    It also affects the micro-batches of a step, which all groups compute together.
    """
    same = ("size", "window", "lr", "warmup", "seed")
    num_bytes = sum(document.num_bytes for document in documents)
    return {f"--{name}": getattr(args, name) for name in same} | {
        "--accumulate (times groups of --cp ranks)": args.accumulate * grid.num_groups,
        "--tokens": packing.rows, "--longest": packing.longest, "--engine": engine,
        "--data": f"{len(documents)} files, {num_bytes} bytes, fingerprint {data.fingerprint(documents):x}",
        "padding (by --sharding and --cp)": f"to multiples of {packing.multiple}",
    }


def saved_run(args: argparse.Namespace, settings: dict[str, Any]) -> Checkpoint | None:
    """Return the checkpoint to resume, if that is asked for.

    Raises:
        ValueError: there is none, it had other settings, or has more steps; or a new run would overwrite one.
    """
    if not args.resume:
        if args.checkpoint and (args.checkpoint / checkpoint.NAME).exists():
            raise ValueError(
                f"--checkpoint is {args.checkpoint}, which holds the checkpoint of another run, wanted a new folder; "
                f"pass --resume to go on with that run, or delete it"
            )
        return None
    saved = checkpoint.load(args.checkpoint)
    different = [
        f"{name} {value} instead of {saved.settings.get(name)}"
        for name, value in settings.items() if saved.settings.get(name) != value
    ]
    if different:
        raise ValueError(
            f"--resume found other options than the run in {args.checkpoint} began with: {', '.join(different)}; pass "
            f"those that it began with, or begin anew in another folder"
        )
    if saved.step > args.steps:
        raise ValueError(f"--steps is {args.steps}, wanted at least the {saved.step} that the run in {args.checkpoint} "
                         f"has done; pass those of the whole run")
    return saved


def check_outputs(args: argparse.Namespace) -> None:
    """Raise ValueError for files that could not be written later, and make their folders."""
    if args.checkpoint:
        command_line.check_writable("--checkpoint", args.checkpoint / f"{checkpoint.NAME}.unfinished")
    if args.metrics:
        command_line.check_writable("--metrics", args.metrics)
    if args.plot:
        command_line.check_picture("--plot", args.plot)
    other_runs(args.beside)


def check_finite(what: str, number: float) -> None:
    """Raise Failure, on all ranks alike, for a number that no checkpoint may contain."""
    if not math.isfinite(number):
        raise command_line.Failure(f"{what} is {number}; lower --lr, or raise --warmup")


def other_runs(files: Sequence[Path]) -> dict[str, measure.Lines]:
    """Return lines of other runs by the name of their file."""
    return {path.stem: measure.read("--beside", path) for path in files}


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="tiny", help="train a model of this size (default: tiny)")
    add("--data", type=Path, metavar="DIR", help="train on the files below it (default: Python's standard library)")
    add("--mask-prompt", action="store_true", help='read lines {"prompt": "...", "answer": "..."} of the .jsonl files '
        "there as documents, and train on answers alone")
    add("--steps", type=positive, metavar="N", help="train for N steps, with those of a resumed run (default: by size)")
    add("--tokens", type=whole(1, INT32_MAX), metavar="N",
        help="pack N rows per micro-batch of a group (default: by size)")
    add("--longest", type=positive, metavar="N", help="split documents longer than N (default: by size)")
    add("--accumulate", type=whole(1, INT32_MAX), default=1, metavar="N",
        help="accumulate N micro-batches of a group per step (default: 1)")
    add("--cp", type=positive, metavar="N", help="share every micro-batch among groups of N ranks (default: all ranks)")
    add("--lr", type=float, metavar="X", help="reach this learning rate (default: by size)")
    add("--warmup", type=positive, metavar="N", help="reach it after N steps (default: a twentieth)")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed weights and order of documents with N (default: 0)")
    add("--engine", choices=["auto", "cuda", "reference"], default="auto",
        help="compute on a GPU or in NumPy (default: a GPU if there is one)")
    add("--window", type=whole(0), metavar="N", help="let every second layer see N bytes; 0: all (default: by size)")
    add("--val-every", type=positive, metavar="N", help="validate every N steps (default: a tenth of --steps)")
    add("--val-bytes", type=positive, metavar="N", help="validate on about N bytes (default: by size)")
    add("--checkpoint", type=Path, metavar="DIR", help="save the run there, for --resume and sample.py")
    add("--save-every", type=positive, metavar="N",
        help="save every N steps, and at the end (default: with every validation)")
    add("--resume", action="store_true", help="resume the run in --checkpoint; pass the options it began with")
    add("--metrics", type=Path, metavar="FILE", help="write a JSON line per step and validation into this new file")
    add("--plot", type=Path, metavar="FILE", help="draw bits per byte into this PNG, PDF or SVG file at the end")
    add("--beside", type=Path, nargs="+", default=[], metavar="FILE",
        help="draw these --metrics of other runs there too")
    add("--bar", action="store_true", help="draw a progress bar where stderr is no terminal, as under mpiexec")
    add_method_arguments(parser)
    add_arguments(parser)
    args = parser.parse_args()
    args.graphs = from_arguments(parser, args, no_inference="training writes no text")
    choose_method(args)
    for name, value in asdict(RECIPES[args.size]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.val_every = args.val_every or max(1, args.steps // 10)
    args.save_every = args.save_every or args.val_every
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint DIR, the folder of the run to go on with")
    if args.mask_prompt and not args.data:
        parser.error("--mask-prompt needs --data DIR, a folder with .jsonl files of prompts and answers")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr is {args.lr}, wanted a finite number above 0; leave it out for {RECIPES[args.size].lr}")
    return args


if __name__ == "__main__":
    sys.exit(main())
