"""Ratio and speed of the codecs on one core, beside zstd and zipnn, on weights that were really trained and on made-up ones.

    python benchmarks/codec.py [--steps 150] [--repeat 7] [--chunk-mib 4] [--made-up] [--no-deltas]

Trains a small byte-level language model on the standard library's own sources with AdamW, then encodes and decodes its weights
and moments chunk by chunk. All systems take turns in one run, in a new order for each repeat, and each figure is the median of
the repeats. Then it trains on at falling learning rates, and stores each part of the state as its delta from 10 steps before;
beside it stands the exclusive or of the two. Speeds are raw GB (1e9 bytes) per second of processor time, so other load and a
peer's threads do not count. Needs torch. zipnn is measured if it is installed; the environment of `compare.py` has it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import nn

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import figures, goals
from checkpointd.codec import ElementType, decode, decode_delta, difference, encode, sample, stored_size_max
from checkpointd.codec.checksum import xxh3_64, xxh3_128

Bytes = NDArray[np.uint8]
CONTEXT, WIDTH, BATCH = 32, 384, 64
WITH_GOALS = {"trained weights bf16": "bf16", "trained weights fp32": "fp32"}
"""The states that `goals.py` has goals for, and what their figures are called."""
DELTA_STEPS, DELTA_RATES = 10, (1e-3, 3e-4, 1e-4)
"""A delta is taken from this many steps before, at each of these learning rates."""
DELTA_GOAL_RATE = 3e-4
"""The learning rate at which `goals.py` looks at the delta of bf16 weights."""


# --- states -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The bytes of a state, all its tensors back to back."""

    name: str
    raw: Bytes
    element: ElementType
    dtype: str


class Model(nn.Module):
    """A Transformer decoder of about 5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, 256) of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden: torch.Tensor = self.layers(self.embed(text) + self.position, mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Training:
    """A model in training on the standard library's sources."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # threads that wait for a busy core cost more than they give
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def run(self, steps: int) -> None:
        """Take `steps` steps, and say how the loss went."""
        losses = []
        for _ in range(steps):
            starts = torch.randint(len(self._text) - CONTEXT - 1, (BATCH,))
            batch = torch.stack([self._text[start : start + CONTEXT + 1] for start in starts])
            loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        print(f"trained {self.weights().numel():,} parameters for {steps} steps: "
              f"loss {losses[0]:.2f} -> {statistics.mean(losses[-10:]):.2f}", flush=True)  # fmt: skip

    def weights(self) -> torch.Tensor:
        """All weights, float32."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def moment(self, name: str) -> torch.Tensor:
        """The optimizer's `exp_avg` or `exp_avg_sq` of all weights."""
        return torch.cat([state[name].flatten() for state in self.optimizer.state.values()])


def trained_states(training: Training) -> Iterator[State]:
    """The parts of a mixed-precision state."""
    weights = training.weights()
    yield state("trained weights bf16", weights.bfloat16())
    yield state("trained weights fp16", weights.half())
    yield state("trained weights fp32", weights)
    for moment in ("exp_avg", "exp_avg_sq"):
        yield state(f"trained {moment} fp32", training.moment(moment))


def made_up_states() -> Iterator[State]:
    """Values that need no training."""
    normal = torch.randn(8 << 20, generator=torch.Generator().manual_seed(1)) * 0.02
    yield state("normal bf16", normal.bfloat16())
    yield state("normal fp32", normal)
    yield state("fp32 made from bf16", normal.bfloat16().float())
    yield state("normal fp64", torch.randn(2 << 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    yield state("token ids int64", torch.randint(50_000, (2 << 20,)))
    yield state("zeros fp32", torch.zeros(8 << 20))
    yield state("noise fp32", torch.randint(256, (32 << 20,), dtype=torch.uint8).view(torch.float32))


def state(name: str, tensor: torch.Tensor) -> State:
    dtype = str(tensor.dtype).removeprefix("torch.")
    raw: Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return State(name, raw, ElementType.of_dtype(dtype), dtype)


# --- systems ------------------------------------------------------------------------------------------------------


class System(Protocol):
    """A way to encode and decode one chunk. Each call of `encode` gets a chunk of its own, which it may change."""

    name: str

    def encode(self, chunk: bytearray) -> Any: ...

    def decode(self, stored: Any, raw_size: int) -> Any: ...


class Ours:
    """checkpointd's codec `planes`."""

    name = "planes"

    def __init__(self, chosen: State, chunk_size: int) -> None:
        self._element = chosen.element
        self._out = np.zeros(chunk_size, np.uint8)
        self._room = np.zeros(stored_size_max(chunk_size), np.uint8)

    def encode(self, chunk: bytearray) -> bytes:
        element = self._element
        stored = encode(chunk, codec="planes", itemsize=element.itemsize, kind=element.kind, out=self._room)
        return bytes(stored)

    def decode(self, stored: bytes, raw_size: int) -> Bytes:
        decode(stored, codec="planes", raw_size=raw_size, out=self._out)
        return self._out[:raw_size]


class Zstd:
    """Plain zstd at a level."""

    def __init__(self, level: int) -> None:
        self.name, self._level = f"zstd {level}", level

    def encode(self, chunk: bytearray) -> bytes:
        return zstandard.ZstdCompressor(level=self._level).compress(chunk)

    def decode(self, stored: bytes, raw_size: int) -> bytes:
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_size)


class ZipNN:
    """zipnn with one thread."""

    name = "zipnn"
    DTYPES = ("bfloat16", "float16", "float32")

    def __init__(self, dtype: str) -> None:
        from zipnn import ZipNN as Compressor

        self._compressor = Compressor(input_format="byte", bytearray_dtype=dtype, threads=1)

    def encode(self, chunk: bytearray) -> bytes:
        return bytes(self._compressor.compress(chunk))

    def decode(self, stored: bytes, raw_size: int) -> bytearray:
        found: bytearray = self._compressor.decompress(stored)
        return found


def systems(chosen: State, chunk_size: int) -> list[System]:
    found: list[System] = [Ours(chosen, chunk_size), Zstd(1), Zstd(3)]
    if chosen.dtype in ZipNN.DTYPES:
        try:
            found.append(ZipNN(chosen.dtype))
        except ImportError:
            print("zipnn is not installed, so it is left out")
    return found


# --- measuring ----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What one system gave on one state."""

    stored: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def measure(chosen: State, chunk_size: int, repeat: int) -> dict[str, Measured]:
    """All systems on one state, in turns. Checks that every byte comes back."""
    chunks = [chosen.raw[start : start + chunk_size] for start in range(0, chosen.raw.size, chunk_size)]
    entered = systems(chosen, chunk_size)
    measured = {system.name: Measured() for system in entered}
    for number in range(repeat + 1):  # the first is to warm up
        for system in random.sample(entered, len(entered)):
            found = measured[system.name]
            took, stored = timed(lambda chunk, system=system: system.encode(chunk), [bytearray(c) for c in chunks])
            back_took, backs = timed(lambda pair, system=system: bytes(system.decode(*pair)), [
                (one, chunk.size) for one, chunk in zip(stored, chunks, strict=True)
            ])  # fmt: skip
            if b"".join(backs) != chosen.raw.tobytes():
                raise SystemExit(f"{chosen.name}: {system.name} did not give back what it was given")
            found.stored = sum(len(one) for one in stored)
            if number:
                found.encode_s.append(took)
                found.decode_s.append(back_took)
    return measured


def timed(work: Callable[[Any], Any], items: list[Any]) -> tuple[float, list[Any]]:
    """Processor seconds of `work` on each of `items`, and its results."""
    began = time.process_time()
    results = [work(item) for item in items]
    return time.process_time() - began, results


def line(chosen: State, name: str, found: Measured) -> str:
    size, ratio = chosen.raw.size, chosen.raw.size / found.stored
    sampled = f"{1 / sample(chosen.raw, chosen.element).planes:.3f}" if name == "planes" else ""
    speeds = (size / statistics.median(seconds) / 1e9 for seconds in (found.encode_s, found.decode_s))
    shown = " ".join(f"{speed:>7.2f}" for speed in speeds)
    return f"{chosen.name:<24} {size / 2**20:>6.1f} {name:<7} {found.stored / size:>7.4f} {ratio:>8.3f} {sampled:>8} {shown}"


def figures_of(chosen: State, measured: dict[str, Measured], called: str) -> figures.Figures:
    """The figures of one state: `codec/<state>/ratio` and `.../GB/s` of checkpointd, and `.../<peer> ratio` of each peer."""
    named: figures.Figures = {}
    for system, found in measured.items():
        peer = "" if system == "planes" else f"{system} "
        named[f"codec/{called}/{peer}ratio"] = {0: chosen.raw.size / found.stored}
        named[f"codec/{called}/{peer}GB/s"] = {0: chosen.raw.size / statistics.median(found.encode_s) / 1e9}
    return named


def measure_deltas(training: Training, chunk_size: int, repeat: int) -> figures.Figures:
    """Print a line for each part of the state at each learning rate. Gives the figure of bf16 weights at DELTA_GOAL_RATE."""
    named: figures.Figures = {}
    for rate in DELTA_RATES:
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        training.run(2 * DELTA_STEPS)
        before = list(trained_states(training))
        training.run(DELTA_STEPS)
        for old, new in zip(before, trained_states(training), strict=True):
            size, shares, speeds = new.raw.size, *_delta(old, new, chunk_size, repeat)
            shown = f"{shares['delta']:>7.4f} {shares['xor']:>7.4f} {shares['full']:>7.4f} {speeds[0]:>7.2f} {speeds[1]:>7.2f}"
            print(f"{new.name:<24} {size / 2**20:>6.1f} {rate:>7.0e} {shown}", flush=True)
            if new.dtype == "bfloat16" and rate == DELTA_GOAL_RATE:
                named["codec/bf16/delta"] = {0: shares["delta"]}
    return named


def _delta(old: State, new: State, chunk_size: int, repeat: int) -> tuple[dict[str, float], tuple[float, float]]:
    """Stored shares of `new` as a delta, as an exclusive or and in full; GB/s of encoding and decoding the delta."""
    width, starts = new.element.itemsize, range(0, new.raw.size, chunk_size)
    pairs = [(new.raw[start : start + chunk_size], old.raw[start : start + chunk_size]) for start in starts]

    def packed(data: Bytes, kind: str = "other") -> bytes:
        return bytes(encode(data, codec="planes", itemsize=width, kind=kind))

    def unpacked(item: tuple[bytes, tuple[Bytes, Bytes]]) -> bytes:
        out = np.empty_like(item[1][0])
        decode_delta(item[0], item[1][1], out=out)
        return out.tobytes()

    encoding, decoding = [], []
    for _ in range(repeat):
        took, stored = timed(lambda pair: packed(difference(*pair, itemsize=width)), pairs)
        encoding.append(took)
        took, backs = timed(unpacked, list(zip(stored, pairs, strict=True)))
        decoding.append(took)
        if b"".join(backs) != new.raw.tobytes():
            raise SystemExit(f"{new.name}: the delta did not give back what it was given")
    every = {"delta": stored, "xor": [packed(x ^ b) for x, b in pairs], "full": [packed(x, "float") for x, _ in pairs]}
    shares = {name: sum(map(len, parts)) / new.raw.size for name, parts in every.items()}
    encode_s, decode_s = statistics.median(encoding), statistics.median(decoding)
    return shares, (new.raw.size / encode_s / 1e9, new.raw.size / decode_s / 1e9)


def main() -> None:
    """Print the table and the verdicts, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the median counts (default 7)")
    parser.add_argument("--chunk-mib", type=int, default=4, help="size of a chunk (default 4)")
    parser.add_argument("--made-up", action="store_true", help="measure made-up values, too")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write what the goals need there")
    parser.add_argument("--no-deltas", action="store_true", help="leave deltas out")
    options = parser.parse_args()
    chunk_size, named = options.chunk_mib << 20, figures.Figures()
    training = Training()
    training.run(options.steps)
    states = [*trained_states(training), *(made_up_states() if options.made_up else ())]
    print(f"{'state':<24} {'MiB':>6} {'system':<7} {'stored':>7} {'ratio':>8} {'sampled':>8} {'enc':>7} {'dec':>7}  (GB/s)")
    for chosen in states:
        measured = measure(chosen, chunk_size, options.repeat)
        for name, found in measured.items():
            print(line(chosen, name, found), flush=True)
        if chosen.name in WITH_GOALS:
            named |= figures_of(chosen, measured, WITH_GOALS[chosen.name])
    for name, digest in (("xxh3_64", xxh3_64), ("xxh3_128", xxh3_128)):
        took = statistics.median(timed(digest, [states[0].raw])[0] for _ in range(options.repeat))
        print(f"{name:<24} {states[0].raw.size / took / 1e9:.1f} GB/s")
    if not options.no_deltas:
        print(f"{'delta':<24} {'MiB':>6} {'rate':>7} {'delta':>7} {'xor':>7} {'full':>7} {'enc':>7} {'dec':>7}  (GB/s)")
        named |= measure_deltas(training, chunk_size, options.repeat)
    print(*goals.lines(goals.verdicts(named, goals.CODEC_GOALS)), sep="\n")
    if options.figures:
        figures.write(options.figures, named)


if __name__ == "__main__":
    main()
