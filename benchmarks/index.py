"""Index of one rank as msgpack and as JSON: size, and processor time to encode, to decode and to check.

    python benchmarks/index.py [--tensors 10000] [--chunks 3] [--repeat 7]

The names and shapes are those of a GPT-like state (weights, master weights, two moments); chunks are of 4 MiB. Each time is the
median of the repeats. Both decode into the same types; the digest of a chunk is bytes in msgpack and base64 in JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec

from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Chunk, Index, TensorEntry, decode_index, encode_index
from checkpointd.layout.manifest import ObjectRef

CHUNK_BYTES = 4 << 20
PARTS = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
KINDS = ("model.{}", "master.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq")


def made(tensors: int, chunks: int) -> Index:
    """An index of `tensors` tensors of `chunks` chunks each, with random checksums and digests."""
    rng, offset, entries = random.Random(7), 0, []
    shape = (chunks * 1024, CHUNK_BYTES // 4 // 1024)
    for number in range(tensors):
        name = KINDS[number % len(KINDS)].format(f"layers.{number // 20}.{PARTS[number % len(PARTS)]}")
        found = []
        for _ in range(chunks):
            found.append(Chunk(0, offset, CHUNK_BYTES, CHUNK_BYTES, "raw", None, rng.randbytes(16)))
            offset += CHUNK_BYTES
        entries.append(TensorEntry(f"{name}.{number}", "float32", shape, whole(shape), "rank", tuple(found)))
    return Index(
        tag="global_step1000",
        attempt="00000001-0",
        rank=3,
        world_size=64,
        step=1000,
        objects=(ObjectRef(name="00003-0.chunks", size=offset),),
        tensors=tuple(entries),
        aliases=(),
        excluded=(),
        tree=b"\xc0",
    )


def seconds(work: Callable[[], object], repeat: int) -> float:
    """Of processor time, since all of it is one thread: the median of `repeat` runs after one to warm up."""
    work()
    runs = []
    for _ in range(repeat):
        began = time.process_time()
        work()
        runs.append(time.process_time() - began)
    return statistics.median(runs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--chunks", type=int, default=3, help="chunks of each tensor (default 3)")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the median counts (default 7)")
    options = parser.parse_args()
    index = made(options.tensors, options.chunks)
    (ref, packed), text = encode_index(index, "00000.index"), msgspec.json.encode(index)
    if decode_index(packed, ref.plan, "") != index or msgspec.json.decode(text, type=Index) != index:
        raise SystemExit("an index did not come back as it was")
    timed = partial(seconds, repeat=options.repeat)
    print(f"{options.tensors} tensors, {options.chunks} chunks each; milliseconds of processor time")
    print(f"{'':<8} {'MiB':>7} {'encode':>8} {'decode':>8}")
    whole = partial(decode_index, packed, ref.plan, "")
    for name, data, encode, decode in (
        ("msgpack", packed, partial(encode_index, index, "00000.index"), whole),
        ("JSON", text, partial(msgspec.json.encode, index), partial(msgspec.json.decode, text, type=Index)),
    ):
        print(f"{name:<8} {len(data) / 2**20:>7.2f} {timed(encode) * 1e3:>8.1f} {timed(decode) * 1e3:>8.1f}")
    print("msgpack is packed and checked as well, JSON is not")


if __name__ == "__main__":
    main()
