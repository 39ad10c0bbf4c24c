"""Write text with a model that train.py has trained: sample.py --checkpoint DIR --prompt "def "

The model decodes all samples together. It reads the prompts as one pack. After that every byte costs one row per text,
as the KV cache keeps keys and values, and the states of mixers. The device draws bytes without waiting for the host.
The program is one process, one rank. With --cuda-graph-impl local each layer is a CUDA graph; with
--inference-cuda-graph-scope block all work for a byte is one graph. The text does not depend on graphs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # command_line.py

import checkpoint
import command_line
import numpy as np
from command_line import positive, whole
from model import Model
from sizes import EOD, VOCAB

import thdattn
from thdattn.arguments import INT32_MAX
from thdattn.graphs import Graphs, add_arguments, from_arguments

LOOK_EVERY = 64  # bytes after which the host asks whether all texts have ended


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
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # terminals may lack characters
    prompt = os.fsencode(args.prompt)  # bytes as they were typed, of any encoding
    with Graphs(comm, args.graphs, args.engine) as graphs:
        with command_line.together(comm):  # texts may need more memory than there is
            capacity = len(prompt) + args.bytes
            sampler = Sampler(model, args.samples, capacity, args.temperature, min(args.top_k, VOCAB), graphs)
        texts = sampler.generate([prompt] * args.samples, args.bytes, np.random.default_rng(args.seed))
    for text in texts:
        print(f"--- after step {saved.step}")
        print(text.decode(errors="replace"))
    return 0


class Sampler:
    """Writer of num_texts texts at a time, of up to `capacity` bytes with their prompts.

    Args:
        model: on one rank.
        num_texts, capacity: sizes of the caches.
        temperature: divides the logits; 0 takes the likeliest byte.
        top_k: draw from the k likeliest bytes only.
        graphs: by their config.inference_scope capture nothing, each "layer", or all work for a byte as one "block".
            The bytes do not depend on it. Layers on the CPU are not captured.

    Attributes:
        step: writes one more byte of every text; texts that have ended go on with EOD.
    """

    def __init__(
        self, model: Model, num_texts: int, capacity: int, temperature: float = 1.0, top_k: int = VOCAB,
        graphs: Graphs | None = None,
    ) -> None:
        self.model, self.num_texts, self.capacity = model, num_texts, capacity
        xp = model.layers.xp
        self._how = (VOCAB, EOD, top_k, temperature) if temperature else (VOCAB, EOD, 1, 1.0)
        self._caches = model.caches(num_texts, max(1, capacity))
        self._tokens, self._counts = xp.zeros((2, num_texts), np.int32)
        self._written = xp.zeros((num_texts, max(1, capacity)), np.int32)
        self._uniforms = xp.zeros(self._written.shape, np.uint32)
        self.step, self._layers = self._eager_step, None
        scope = "none" if graphs is None or xp is np else graphs.config.inference_scope
        if graphs is not None and scope == "block":
            self.step = graphs.captured(self._eager_step, "step")
        if graphs is not None and scope == "layer":
            self._layers = [graphs.captured(partial(model.decode_layer, layer, self._caches), f"layer {layer}")
                            for layer in range(model.config.layers)]

    def generate(self, prompts: list[bytes], num_bytes: int, rng: np.random.Generator) -> list[bytes]:
        """Return texts that begin with the prompts and that the model continues.

        Args:
            prompts: num_texts of them; may be empty.
            num_bytes: most bytes to add; a text that the model ends is shorter.
            rng: draws.

        Raises:
            ValueError: another number of prompts, or texts that would be longer than the capacity.
        """
        longest = max(map(len, prompts), default=0)
        if len(prompts) != self.num_texts:
            raise ValueError(f"prompts are {len(prompts)}, wanted {self.num_texts}, the num_texts of the sampler")
        if longest + num_bytes > self.capacity:
            raise ValueError(
                f"a prompt of {longest} bytes and num_bytes = {num_bytes} are {longest + num_bytes}, wanted at most "
                f"{self.capacity}, the capacity of the sampler; make one with more"
            )
        if not num_bytes:
            return prompts
        self.start(prompts, rng.integers(2**32, size=(self.num_texts, num_bytes), dtype=np.uint32))
        for done in range(1, num_bytes):
            if done % LOOK_EVERY == 0 and bool((self._tokens == EOD).all()):
                break
            self.step()
        return [prompt + _until_eod(text) for prompt, text in zip(prompts, self._all_written(), strict=True)]

    def start(self, prompts: list[bytes], uniforms: np.ndarray) -> None:
        """Read the prompts, and draw the first byte after each.

        uniforms: (num_texts, bytes) uint32, for this draw and those of later steps.
        """
        xp = self.model.layers.xp
        self._uniforms[:, : uniforms.shape[1]] = xp.asarray(uniforms)
        self._counts.fill(0)
        batch = thdattn.PackedBatch.from_lengths([len(prompt) + 1 for prompt in prompts])
        tokens = batch.pack([np.array([EOD, *prompt], np.int32) for prompt in prompts])
        logits = self.model.prefill(xp.asarray(tokens), self.model.plan(batch, "contiguous"), self._caches)
        self._draw(logits[xp.asarray(batch.cu_seqlens[1:] - 1)])

    def _eager_step(self) -> None:
        self._draw(self.model.decode(self._tokens, self._caches, self._layers))

    def _draw(self, logits: Any) -> None:
        self.model.layers.draw(self._tokens, self._written, self._counts, logits, self._uniforms, *self._how)

    def _all_written(self) -> list[list[int]]:
        counts = self._counts.tolist()
        return [text[:count] for text, count in zip(self._written.tolist(), counts, strict=True)]


def _until_eod(drawn: list[int]) -> bytes:
    return bytes(drawn[: drawn.index(EOD)] if EOD in drawn else drawn)


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", required=True, help="read the checkpoint in this folder")
    add("--prompt", default="", metavar="TEXT", help="begin the text with this (default: nothing)")
    add("--bytes", type=whole(0, INT32_MAX), default=400, metavar="N", help="add at most N bytes (default: 400)")
    add("--samples", type=whole(1, INT32_MAX), default=1, metavar="N", help="write N texts (default: 1)")
    add("--temperature", type=float, default=0.7, metavar="X",
        help="divide logits by X; 0 takes the likeliest byte (default: 0.7)")
    add("--top-k", type=positive, default=VOCAB, metavar="N",
        help="draw from the N likeliest bytes only (default: all)")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed the draws with N (default: 0)")
    add("--engine", choices=["auto", "cuda", "reference"], default="auto",
        help="compute on a GPU or in NumPy (default: a GPU if there is one)")
    add_arguments(parser)
    args = parser.parse_args()
    args.graphs = from_arguments(parser, args)
    if not 0 <= args.temperature < math.inf:
        parser.error(f"--temperature is {args.temperature}, wanted a finite number of at least 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
