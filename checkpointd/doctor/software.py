"""Tests that the libraries are installed, load and compute correctly. Torch's version is read without importing torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from functools import partial
from importlib import metadata
from typing import Final

from checkpointd import __version__
from checkpointd.commands import install
from checkpointd.doctor.finding import Diagnosis, Finding

_ZSTD: Final = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
LIBRARIES: Final = (_ZSTD, "click", "msgspec", "numpy", "rich", "uvloop", "xxhash", "zstandard")
SERVE: Final = ("aiohttp", "prometheus_client", "psutil")
TORCH_LEAST: Final = (2, 10)
_XXH3_64_OF_NOTHING: Final = 0x2D06800538D394C2
_XXH3_128_OF_NOTHING: Final = "99aa06d3014798d86001c324468d497f"

_finding = partial(Finding, "software")


def libraries(names: tuple[str, ...] = LIBRARIES) -> Finding:
    """The libraries that the service itself needs."""
    broken = [f"{name}: {why}" for name in names if (why := _why_not_imported(name))]
    if broken:
        return _finding(
            "libraries",
            "fail",
            "; ".join(broken),
            "install checkpointd again from its clone or wheel file, into an environment of its own",
        )
    return _finding("libraries", "ok", ", ".join(f"{name} {version(name) or '?'}" for name in names))


def _why_not_imported(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken extension raises whatever it likes
        return f"{type(error).__name__}: {error}"
    return ""


def only_libraries() -> Diagnosis:
    """The diagnosis if broken libraries prevent all other checks."""
    return Diagnosis(
        release=__version__,
        root=None,
        socket=None,
        state_bytes=None,
        state_source="not known",
        fit=False,
        findings=(libraries(),),
    )


def serve_libraries(names: tuple[str, ...] = SERVE) -> Finding:
    """The libraries that the sidecar needs for HTTP, metrics and niceness."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        seen = f"not installed: {', '.join(missing)}"
        return _finding("serve-libraries", "note", seen, f"only a sidecar needs them: {install('serve')}")
    return _finding("serve-libraries", "ok", ", ".join(f"{name} {version(name) or '?'}" for name in names))


def codecs() -> Finding:
    """A round trip through every codec, and the known checksums of empty input."""
    import numpy as np

    from checkpointd.codec import CODECS, decode, encode
    from checkpointd.codec.checksum import xxh3_64, xxh3_128_hex

    if xxh3_64(b"") != _XXH3_64_OF_NOTHING or xxh3_128_hex(b"") != _XXH3_128_OF_NOTHING:
        return _finding("codecs", "fail", "xxhash computes wrong checksums", "install xxhash again")
    data = np.random.default_rng(1).normal(0, 0.02, 50_000).astype(np.float32).view(np.uint8)
    wrong = []
    for codec in CODECS:
        back = np.zeros_like(data)
        try:
            decode(encode(data, codec=codec, itemsize=4, kind="float"), codec=codec, raw_size=data.size, out=back)
        except Exception as error:  # any error means that this codec cannot be used here
            wrong.append(f"{codec} ({error})")
            continue
        if not np.array_equal(back, data):
            wrong.append(codec)
    if wrong:
        advice = "install zstandard and numpy again; until then do not trust compressed checkpoints on this machine"
        return _finding("codecs", "fail", f"a round trip fails: {', '.join(wrong)}", advice)
    return _finding("codecs", "ok", f"{', '.join(CODECS)}: encoded bytes decode to the same bytes")


def torch(found: str | None) -> Finding:
    """Whether the installed torch is new enough. `found` is its version, or None if it is not installed."""
    if found is None:
        return _finding("torch", "note", "torch is not installed here", f"only a training script needs it: {install('torch')}")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < TORCH_LEAST:
        least = ".".join(map(str, TORCH_LEAST))
        return _finding("torch", "fail", f"torch {found}", f"checkpointd_client needs torch {least} or newer")
    return _finding("torch", "ok", f"torch {found}")


def version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def here() -> list[Finding]:
    """All checks of this environment."""
    own = libraries()
    return [own, *([codecs()] if own.level == "ok" else []), serve_libraries(), torch(version("torch"))]
