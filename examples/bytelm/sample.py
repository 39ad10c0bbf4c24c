"""Writes text with a model that train.py has trained: sample.py --checkpoint DIR --prompt "def "

All samples are documents of one pack, each as long as it has become. Nothing is kept from byte to byte: every one costs
a forward over all that came before, which is simple, and slow for long texts. One process, one rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # command_line.py

import checkpoint
import command_line
import numpy as np
from model import EOD, VOCAB, Model
from numpy.typing import NDArray

import thdattn


def main() -> int:
    return command_line.run(program)


def program(comm: thdattn.comm.Comm) -> int:
    with command_line.together(comm):
        args = parse_arguments()
        if comm.size > 1:
            raise ValueError(f"this is one of {comm.size} ranks, wanted one process; start it without mpiexec")
        saved = checkpoint.load(args.checkpoint)
        model = Model(saved.config, comm, args.engine)
    model.weights[...] = model.layers.xp.asarray(saved.weights)
    model.refresh()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show all of it
    rng = np.random.default_rng(args.seed)
    for text in generate(model, args.prompt.encode(), args.bytes, args.samples, args.temperature, args.top_k, rng):
        print(f"--- after step {saved.step}")
        print(text.decode(errors="replace"))
    return 0


def generate(
    model: Model, prompt: bytes, num_bytes: int, samples: int, temperature: float, top_k: int, rng: np.random.Generator
) -> list[bytes]:
    """Texts that begin with the prompt and go on as the model says.

    Args:
        model: on one rank.
        prompt: what every text begins with; may be empty.
        num_bytes: bytes to add at most; a text that the model ends is shorter.
        samples: how many texts.
        temperature: the logits are divided by it; 0 takes the likeliest byte.
        top_k: only the k likeliest are drawn from.
        rng: draws.
    """
    texts = [bytearray(prompt) for _ in range(samples)]
    growing = list(texts)
    for _ in range(num_bytes):
        if not growing:
            break
        drawn = [draw(logits, temperature, top_k, rng) for logits in next_logits(model, growing)]
        for text, byte in zip(growing, drawn, strict=True):
            if byte != EOD:
                text.append(byte)
        growing = [text for text, byte in zip(growing, drawn, strict=True) if byte != EOD]
    return [bytes(text) for text in texts]


def next_logits(model: Model, texts: list[bytearray]) -> NDArray[np.float32]:
    """(len(texts), VOCAB) float32: of the byte after each text."""
    batch = thdattn.PackedBatch.from_lengths([len(text) + 1 for text in texts])
    tokens = batch.pack([np.array([EOD, *text], np.int32) for text in texts])
    plan = model.plan(batch, "contiguous")
    logits = model.logits(model.layers.xp.asarray(tokens), plan)[model.layers.xp.asarray(batch.cu_seqlens[1:] - 1)]
    return logits if isinstance(logits, np.ndarray) else np.asarray(logits.get())


def draw(logits: NDArray[np.float32], temperature: float, top_k: int, rng: np.random.Generator) -> int:
    """A byte or EOD, by the softmax of its logits."""
    likeliest = np.argsort(-logits, kind="stable")[: top_k if temperature else 1]
    scores = logits[likeliest].astype(np.float64)
    weights = np.exp((scores - scores[0]) / (temperature or 1))
    return int(rng.choice(likeliest, p=weights / weights.sum()))


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", required=True, help="folder that train.py saved to")
    add("--prompt", default="", metavar="TEXT", help="what the text begins with (default: nothing)")
    add("--bytes", type=int, default=400, metavar="N", help="to add at most (default: 400)")
    add("--samples", type=int, default=1, metavar="N", help="how many texts (default: 1)")
    add("--temperature", type=float, default=0.7, metavar="X", help="0: always the likeliest byte (default: 0.7)")
    add("--top-k", type=int, default=VOCAB, metavar="N", help="draw from the N likeliest only (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    add("--engine", choices=["auto", "cuda", "reference"], default="auto", help="GPU or NumPy (default: what is there)")
    args = parser.parse_args()
    if args.samples < 1 or args.top_k < 1 or args.bytes < 0 or args.temperature < 0:
        parser.error("wanted --samples and --top-k of at least 1, --bytes and --temperature of at least 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
