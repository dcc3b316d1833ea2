"""Ratio and speed of each codec on one core, on weights that were really trained and on made-up ones.

    python benchmarks/codec.py [--steps 150] [--repeat 7] [--chunk-mib 4]

Trains a small byte-level language model on the standard library's own sources with AdamW, then encodes and decodes its weights
and moments chunk by chunk, each line the median of the repeats. Speeds are raw GB (1e9 bytes) per second. Needs torch.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from checkpointd.codec import ElementType, decode, encode, sample, stored_size_max
from checkpointd.codec.checksum import xxh3_64, xxh3_128

Bytes = NDArray[np.uint8]
CONTEXT, WIDTH, BATCH = 32, 384, 64


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


def train(steps: int) -> tuple[Model, torch.optim.AdamW]:
    """A model and its optimizer after `steps` steps; says how the loss went."""
    torch.manual_seed(0)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"trained {sum(p.numel() for p in model.parameters()):,} parameters for {steps} steps: "
          f"loss {losses[0]:.2f} -> {statistics.mean(losses[-10:]):.2f}")  # fmt: skip
    return model, optimizer


def trained_states(steps: int) -> Iterator[tuple[str, Bytes, ElementType]]:
    """Name, bytes, element of each part of a mixed-precision state, all its tensors back to back."""
    model, optimizer = train(steps)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    yield "trained weights bf16", as_bytes(weights.bfloat16()), ElementType(2, "float")
    yield "trained weights fp16", as_bytes(weights.half()), ElementType(2, "float")
    yield "trained weights fp32", as_bytes(weights), ElementType(4, "float")
    for moment in ("exp_avg", "exp_avg_sq"):
        values = torch.cat([state[moment].flatten() for state in optimizer.state.values()])
        yield f"trained {moment} fp32", as_bytes(values), ElementType(4, "float")
    yield "fp32 made from bf16", as_bytes(weights.bfloat16().float()), ElementType(4, "float")


def made_up_states() -> Iterator[tuple[str, Bytes, ElementType]]:
    """The same for values that need no training."""
    normal = torch.randn(8 << 20, generator=torch.Generator().manual_seed(1)) * 0.02
    yield "normal bf16", as_bytes(normal.bfloat16()), ElementType(2, "float")
    yield "normal fp32", as_bytes(normal), ElementType(4, "float")
    double = torch.randn(2 << 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    yield "normal fp64", as_bytes(double), ElementType(8, "float")
    yield "token ids int64", as_bytes(torch.randint(50_000, (2 << 20,))), ElementType(8, "other")
    yield "zeros fp32", as_bytes(torch.zeros(8 << 20)), ElementType(4, "float")
    yield "noise", as_bytes(torch.randint(256, (32 << 20,), dtype=torch.uint8)), ElementType(4, "float")


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes, as an array that shares its memory."""
    array: Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return array


def seconds(work: Callable[[], Any], repeat: int) -> float:
    """The median of `repeat` runs after one to warm up."""
    work()
    runs = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def measure(name: str, raw: Bytes, element: ElementType, codec: str, chunk_size: int, repeat: int) -> str:
    """One line of the table; checks that every byte comes back."""
    chunks = [raw[start : start + chunk_size] for start in range(0, raw.size, chunk_size)]
    slots = [np.zeros(stored_size_max(chunk.size), dtype=np.uint8) for chunk in chunks]
    back = np.zeros_like(raw)
    backs = [back[start : start + chunk_size] for start in range(0, raw.size, chunk_size)]

    def encode_all() -> list[memoryview]:
        return [
            encode(chunk, codec=codec, itemsize=element.itemsize, kind=element.kind, out=slot)
            for chunk, slot in zip(chunks, slots, strict=True)
        ]

    stored = encode_all()

    def decode_all() -> None:
        for part, out in zip(stored, backs, strict=True):
            decode(part, codec=codec, raw_size=out.size, out=out)

    encode_s, decode_s = seconds(encode_all, repeat), seconds(decode_all, repeat)
    if not np.array_equal(back, raw):
        raise SystemExit(f"{name}: {codec} did not give back what it was given")
    ratio = sum(part.nbytes for part in stored) / raw.size
    estimate = {"zstd": "zstd", "planes": "planes"}.get(codec)
    sampled = getattr(sample(raw, element), estimate) if estimate else 1.0
    speeds = f"{raw.size / encode_s / 1e9:>7.2f} {raw.size / decode_s / 1e9:>7.2f}"
    return f"{name:<24} {raw.size / 2**20:>6.1f} {codec:<7} {ratio:>7.4f} {sampled:>8.4f} {speeds}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the median counts (default 7)")
    parser.add_argument("--chunk-mib", type=int, default=4, help="size of a chunk (default 4)")
    options = parser.parse_args()
    states = [*trained_states(options.steps), *made_up_states()]
    print(f"{'state':<24} {'MiB':>6} {'codec':<7} {'ratio':>7} {'sampled':>8} {'enc':>7} {'dec':>7}  GB/s, one core")
    for name, raw, element in states:
        for codec in ("raw", "zstd", "planes"):
            print(measure(name, raw, element, codec, options.chunk_mib << 20, options.repeat), flush=True)
    chunk = states[0][1][: options.chunk_mib << 20]
    for digest in (xxh3_64, xxh3_128):
        print(f"{digest.__name__:<24} {chunk.size / seconds(lambda: digest(chunk), options.repeat) / 1e9:.1f} GB/s")  # noqa: B023


if __name__ == "__main__":
    main()
