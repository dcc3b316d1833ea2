"""The code base keeps its own rules: which way imports go, what pure packages may touch, and what nobody writes.

Each rule reads a file's syntax tree and names the replacement of what it bans. `test_catches` feeds every rule something
bad, so a rule that no longer finds anything fails here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

from checkpointd.cli import COMMANDS

# One process reads all sources, once for all rules.
pytestmark = pytest.mark.xdist_group("sources")

ROOT = Path(__file__).resolve().parents[1]
SERVICE, CLIENT, TESTS = "checkpointd", "client/checkpointd_client", "tests"
FOLDERS = (SERVICE, CLIENT, TESTS, "examples", "benchmarks", "docs")
LINES_MAX = 600
ROOM_FILES_MAX = 15

# The floors of the house. A module stands where its longest prefix here says, and imports from its own room and from lower
# floors. A room whose modules stand on several floors lists those that differ. `testing` may import all; nobody imports it.
LAYERS = {
    "checkpointd.errors": 0,
    "checkpointd.commands": 0,
    "checkpointd.memory_limit": 0,
    "checkpointd.regular_files": 0,
    "checkpointd.arguments": 1,
    "checkpointd.phrases": 1,
    "checkpointd.waits": 1,
    "checkpointd.system_errors": 2,
    "checkpointd.times": 1,
    "checkpointd.layout": 1,
    "checkpointd.codec": 1,
    "checkpointd.commit": 2,
    "checkpointd.config": 3,
    "checkpointd.store.names": 3,
    "checkpointd.bucket_urls": 2,
    "checkpointd.other_formats": 2,
    "checkpointd.store.writers": 3,
    "checkpointd.store.posix": 4,
    "checkpointd.store": 5,
    "checkpointd.store.objects": 6,
    "checkpointd.store.posix.store": 6,
    "checkpointd.store.opening": 7,
    "checkpointd.pipeline": 8,
    "checkpointd.pipeline.root": 9,
    "checkpointd.pipeline.read": 10,
    "checkpointd.pipeline.write": 11,
    "checkpointd.pipeline.gc": 11,
    "checkpointd.pipeline.outcome": 12,
    "checkpointd.pipeline.announcement": 10,
    "checkpointd.pipeline.attempt_errors": 12,
    "checkpointd.pipeline.writer_state": 13,
    "checkpointd.pipeline.attempt": 14,
    "checkpointd.export": 14,
    "checkpointd.report": 14,
    "checkpointd.mirror": 14,
    "checkpointd.admin": 15,
    "checkpointd.daemon.accounts": 15,
    "checkpointd.daemon.process": 15,
    "checkpointd.daemon.status": 15,
    "checkpointd.daemon.spool": 15,
    "checkpointd.daemon.protocol": 16,
    "checkpointd.daemon.memory": 17,
    "checkpointd.daemon": 18,
    "checkpointd.daemon.roots": 19,
    "checkpointd.daemon.hub_status": 20,
    "checkpointd.daemon.service": 21,
    "checkpointd.daemon.http": 21,
    "checkpointd.daemon.runner": 22,
    "checkpointd.doctor": 23,
    "checkpointd.cli": 24,
    "checkpointd.cli.commands": 25,
    "checkpointd.__main__": 26,
    "checkpointd.testing": 26,
    "checkpointd.testing.job": 27,
    "checkpointd_client.errors": 30,
    "checkpointd_client.unpickling": 30,
    "checkpointd_client.devices": 30,
    "checkpointd_client.ranks": 31,
    "checkpointd_client.sharding": 31,
    "checkpointd_client.capture.plain": 31,
    "checkpointd_client.capture": 32,
    "checkpointd_client.staging": 33,
    "checkpointd_client.export": 36,
    "checkpointd_client.saves": 34,
    "checkpointd_client.sidecar": 35,
    "checkpointd_client.restore": 35,
    "checkpointd_client.restore.matching": 36,
    "checkpointd_client.restore.plan": 37,
    "checkpointd_client.restore.store_source": 38,
    "checkpointd_client.restore.memory_source": 39,
    "checkpointd_client.restore.candidate": 39,
    "checkpointd_client.restore.spool_source": 39,
    "checkpointd_client": 40,
    "checkpointd_client.selftest": 41,
    "checkpointd_client.integrations.conversion": 41,
    "checkpointd_client.integrations.dcp": 42,
    "checkpointd_client.integrations.ray": 42,
    "checkpointd_client.integrations.torchtitan": 42,
    "checkpointd_client.integrations.torchtitan.checkpoints": 43,
    "checkpointd_client.integrations.torchtitan.fault_tolerance": 44,
    "checkpointd_client.integrations.torchdata": 42,
    "checkpointd_client.integrations.deepspeed.offline": 42,
    "checkpointd_client.integrations.directories": 42,
    "checkpointd_client.integrations.huggingface": 43,
    "checkpointd_client.integrations.lightning": 43,
    "checkpointd_client.integrations.deepspeed": 44,
    "checkpointd_client.integrations.deepspeed.attaching": 45,
}
PURE = {"arguments", "phrases", "layout", "codec", "commit"}
DEEPSPEED = "client/checkpointd_client/integrations/deepspeed/"
LIGHTNING = "client/checkpointd_client/integrations/lightning/"
TORCHTITAN = "client/checkpointd_client/integrations/torchtitan/"
DEVICES = "client/checkpointd_client/devices.py"
EXTRAS = {"testing": "test", "daemon": "serve"}
"""The extra whose dependencies a part of the service may import."""
EXTRAS_OF_ROOMS = {
    DEEPSPEED: "deepspeed",
    LIGHTNING: "lightning",
    "client/checkpointd_client/integrations/ray/": "ray",
    TORCHTITAN: "torchtitan",
    "checkpointd/store/objects/": "s3",
}
"""The same for single rooms."""
# What a pure package may import from outside; of the service: `errors` and its own kind.
PURE_MODULES = {
    *("__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "copy", "dataclasses", "enum"),
    *("contextlib", "fractions", "functools", "graphlib", "hashlib", "heapq", "itertools", "json", "math", "numbers"),
    *("operator", "posixpath", "re", "string", "struct", "sys", "textwrap", "types", "typing", "unicodedata", "zlib"),
    *("backports", "compression", "msgspec", "numpy", "typing_extensions", "xxhash", "zstandard"),
}
ENVIRONMENT_READERS = {
    "checkpointd/config.py",
    "client/checkpointd_client/ranks/board.py",
    "checkpointd/cli/commands/serve.py",  # sets what numpy reads when it is imported
}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CLIENT_FILES = "client/checkpointd_client/"
MAY_PICKLE: dict[str, set[str]] = {
    # Files for torch.load(weights_only=True), of tensors and DeepSpeed's own objects: on the way out.
    f"{CLIENT_FILES}export/torch_file.py": {"torch.save"},
    f"{DEEPSPEED}offline/exporting.py": {"torch.save"},
    # DeepSpeed's and Lightning's own files, which are pickles: made and read as it does.
    f"{CLIENT_FILES}capture/torch_files.py": {"pickle", "torch.save"},
    f"{LIGHTNING}checkpoint_io.py": {"torch.load"},
    f"{LIGHTNING}strategy.py": {"torch.save", "torch.load"},
    f"{DEEPSPEED}checkpoint_engine.py": {"torch.save", "torch.load"},
    # Read with inert stand-ins for all that they name.
    f"{CLIENT_FILES}unpickling/unpickler.py": {"pickle"},
    # DCP's own bytes, and its `.metadata` on the way out.
    f"{CLIENT_FILES}integrations/conversion/objects.py": {"torch.save"},
    f"{CLIENT_FILES}integrations/conversion/metadata_file.py": {"pickle"},
    # Objects in client_state, for those who ask for it.
    f"{CLIENT_FILES}capture/pickled.py": {"torch.save", "torch.load"},
}
"""What the files that have to do with pickles may import and call."""
VAGUE = re.compile(r"(^|_)(utils?|helpers?|commons?|managers?|misc)(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the repository, and its text."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @cached_property
    def package(self) -> str:
        """The top folder that decides which rules hold: one of FOLDERS."""
        return next(folder for folder in FOLDERS if self.path.startswith(f"{folder}/"))

    @cached_property
    def part(self) -> str | None:
        """The part of the service (`store`, `errors`), "" for its `__init__.py`, None outside the service."""
        if self.package != SERVICE:
            return None
        first = PurePosixPath(self.path).parts[1].removesuffix(".py")
        return "" if first == "__init__" else first

    @cached_property
    def module(self) -> str:
        """The dotted name under which it is imported."""
        parts = PurePosixPath(self.path.removeprefix("client/")).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def shipped(self) -> bool:
        return self.package in (SERVICE, CLIENT)

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full dotted name of every import, at any depth; `from a import b` counts as `a.b`."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.lineno, f"{self._origin(node)}.{alias.name}") for alias in node.names]
        return found

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = PurePosixPath(self.path).parts[:-1]
        above = here[1 if here[0] == "client" else 0 : len(here) - node.level + 1]
        return ".".join([*above, *filter(None, [node.module])])

    @cached_property
    def uses(self) -> list[tuple[int, str]]:
        """Line and dotted name of every use of a name (`os.environ`, `print`), imported names included."""
        names = [(node.lineno, dotted(node)) for node in self.nodes if isinstance(node, ast.Attribute | ast.Name)]
        return names + self.imports

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Every call, and the dotted name of what it calls."""
        return [(node, dotted(node.func)) for node in self.nodes if isinstance(node, ast.Call)]


def dotted(node: ast.AST) -> str:
    """`os.path.join` for the use of such a name; "" where it begins with something else, as the result of a call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


Rule = Callable[[Source], Iterator[str]]


def outside(name: str) -> str:
    return name.partition(".")[0]


def part_of(name: str) -> str | None:
    """The part of the service that an import names: "" for the package itself, None for anything else."""
    if outside(name) != "checkpointd":
        return None
    second = f"{name}.".split(".")[1]
    return second if f"{SERVICE}.{second}" in LAYERS else ""


def floor_of(name: str) -> str | None:
    """The entry of LAYERS that a module belongs to."""
    parts = name.split(".")
    return next((key for n in range(len(parts), 1, -1) if (key := ".".join(parts[:n])) in LAYERS), None) or (
        parts[0] if parts[0] in LAYERS else None
    )


def service_stands_alone(source: Source) -> Iterator[str]:
    if source.part is None:
        return
    for line, name in source.imports:
        if outside(name) in ("torch", "checkpointd_client"):
            yield f"{line}: the service imports {name}; instead: let the client hand over bytes, names and numbers"
    if source.module == "checkpointd.other_formats":  # it recognises files of others, and says which command reads them
        return
    if found := re.search(r"mp_rank_|_states\.pt", source.text):
        yield f"1: the service knows {found[0]}, as DeepSpeed names its files; instead: let the adapter pass it"


def layers_go_down(source: Source) -> Iterator[str]:
    """The `__init__.py` of a room shows what lies in it, whatever floor that stands on."""
    if not source.shipped or source.path.endswith("__init__.py"):
        return
    own = floor_of(source.module)
    if own is None:
        yield f"1: {source.module} has no layer; instead: give it its place in LAYERS of tests/test_tidy.py"
        return
    for line, name in source.imports:
        floor = floor_of(name)
        if floor and floor != own and LAYERS[floor] >= LAYERS[own]:
            yield f"{line}: {own} imports {name}, which is not below it; instead: pass in what is needed"


def pure_packages_are_pure(source: Source) -> Iterator[str]:
    if source.part not in PURE:
        return
    for line, name in source.imports:
        part = part_of(name)
        pure = outside(name) in PURE_MODULES if part is None else part in {"errors", *PURE}
        if not pure:
            yield f"{line}: {source.part} is pure and imports {name}; instead: return what to do, let pipeline/ do it"


def only_tests_use_testing(source: Source) -> Iterator[str]:
    if not source.shipped or source.part == "testing":
        return
    for line, name in source.imports:
        if part_of(name) == "testing":
            yield f"{line}: shipped code imports {name}; instead: take the store or the clock as an argument"


def dependencies_are_declared(source: Source) -> Iterator[str]:
    if not source.shipped:
        return
    own = {"checkpointd"} if source.part is not None else {"checkpointd", "checkpointd_client", "torch"}
    extra = next((one for room, one in EXTRAS_OF_ROOMS.items() if source.path.startswith(room)), EXTRAS.get(source.part or ""))
    # `compression` is in the standard library since Python 3.14.
    allowed = declared(extra) | own | sys.stdlib_module_names | {"compression"}
    for line, name in source.imports:
        if outside(name) not in allowed:
            yield f"{line}: {name} is not a dependency; instead: declare it in pyproject.toml, or use what is there"


def declared(extra: str | None) -> set[str]:
    """Import names of the distribution's dependencies, and of those of `extra`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    return {re.split(r"[^A-Za-z0-9_-]", line)[0].replace("-", "_") for line in lines}


def nothing_is_pickled(source: Source) -> Iterator[str]:
    if not source.shipped:
        return
    allowed = MAY_PICKLE.get(source.path, set())
    for line, name in source.imports:
        if outside(name) in PICKLES - allowed:
            yield f"{line}: imports {name}, which runs code when it loads; instead: msgspec, or a node of layout/tree.py"
    for node, called in source.calls:
        if called not in ("torch.load", "torch.save", "np.load", "numpy.load") or called in allowed:
            continue
        yield f"{node.lineno}: {called} pickles; instead: raw bytes with a dtype and a shape"


def only_devices_names_cuda(source: Source) -> Iterator[str]:
    if not source.shipped or source.path == DEVICES:
        return
    for line, name in [*source.imports, *source.uses]:
        if name.startswith("torch.cuda"):
            yield f"{line}: {name} knows one kind of device; instead: torch.accelerator, torch.Stream, or a call of devices.py"


def nobody_sleeps(source: Source) -> Iterator[str]:
    """`time.sleep(0)` only hands over the processor, so it may stay."""
    if "sleep" not in source.text or not (source.shipped or source.package == TESTS):
        return
    imported = [line for line, name in source.imports if name == "time.sleep"]
    calls = [node for node, called in source.calls if called == "time.sleep"]
    for line in imported + [call.lineno for call in calls if ast.unparse(call) != "time.sleep(0)"]:
        yield f"{line}: time.sleep; instead: wait for the state itself (Event, Future, Process.wait, a line of output)"


def environment_is_read_once(source: Source) -> Iterator[str]:
    if not source.shipped or source.path in ENVIRONMENT_READERS:
        return
    for line, name in source.uses:
        if name in ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"):
            yield f"{line}: {name}; instead: a field of checkpointd/config.py, or of the client's ranks/board.py, passed down"


def only_the_cli_prints(source: Source) -> Iterator[str]:
    if not source.shipped or source.part == "cli":
        return
    for line, name in source.uses:
        if name == "print":
            yield f"{line}: print(); instead: logging.getLogger(__name__), or return it to the command line"


def suggested_commands_are_whole(source: Source) -> Iterator[str]:
    """Docstrings may name a command alone: nobody is asked to run it."""
    if not source.shipped or source.path == "checkpointd/commands.py":
        return
    docstrings = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    for node in source.nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and "`checkpointd " in node.value:
            yield f"{node.lineno}: a command in a message; instead: command(...) of checkpointd/commands.py, with root and tag"


def suggested_commands_exist(source: Source) -> Iterator[str]:
    for node, called in source.calls if source.shipped else ():
        if called == "command" and node.args:
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and not name.startswith("-") and name not in COMMANDS:
                yield f"{node.lineno}: there is no command {name!r}; instead: one that `checkpointd --help` lists"


def names_say_something(source: Source) -> Iterator[str]:
    for name in PurePosixPath(source.path).with_suffix("").parts:
        if VAGUE.search(name):
            yield f"1: {name!r} says nothing about what is in it; instead: the word for what it does"


def files_stay_small(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if source.shipped and lines > LINES_MAX:
        yield f"{lines}: {lines} lines, {LINES_MAX} are the limit; instead: split it where it holds two ideas"


RULES: tuple[Rule, ...] = (
    service_stands_alone,
    layers_go_down,
    pure_packages_are_pure,
    only_tests_use_testing,
    dependencies_are_declared,
    nothing_is_pickled,
    only_devices_names_cuda,
    nobody_sleeps,
    environment_is_read_once,
    only_the_cli_prints,
    suggested_commands_are_whole,
    suggested_commands_exist,
    names_say_something,
    files_stay_small,
)


@cache
def sources() -> list[Source]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tidy(rule: Rule) -> None:
    found = [f"{source.path}:{violation}" for source in sources() for violation in rule(source)]
    assert not found, "\n".join(found)


def test_pages_name_commands_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {(path.name, name) for path in pages for name in re.findall(r"`checkpointd ([a-z-]+)", path.read_text())}
    assert ("OPERATING.md", "inspect") in named
    assert sorted((page, name) for page, name in named if name not in COMMANDS and not name.startswith("-")) == []


def test_the_files_that_rules_name_exist() -> None:
    assert [path for path in {*ENVIRONMENT_READERS, *MAY_PICKLE, DEVICES} if not (ROOT / path).is_file()] == []


def test_reads_every_package() -> None:
    """The rules are worth nothing where they do not look."""
    seen = {source.path for source in sources()}
    assert {"checkpointd/__init__.py", "checkpointd/errors.py", "tests/test_tidy.py"} <= seen


BAD: list[tuple[Rule, str, str]] = [
    (service_stands_alone, "checkpointd/store/a.py", "import torch.cuda"),
    (service_stands_alone, "checkpointd/a.py", "def f():\n    from torch import Tensor"),
    (service_stands_alone, "checkpointd/cli/a.py", "from checkpointd_client import Checkpointer"),
    (layers_go_down, "checkpointd/errors.py", "from checkpointd import layout"),
    (layers_go_down, "checkpointd/commit/a.py", "from checkpointd.store.base import Store"),
    (layers_go_down, "checkpointd/store/a.py", "import checkpointd.pipeline.write.persist"),
    (layers_go_down, "checkpointd/store/a.py", "from ..pipeline import shard"),
    (layers_go_down, "checkpointd/pipeline/a.py", "if TYPE_CHECKING:\n    from checkpointd.cli import main"),
    (layers_go_down, "checkpointd/pipeline/root/a.py", "from checkpointd.pipeline.attempt import Attempt"),
    (layers_go_down, "checkpointd/pipeline/gc/a.py", "from checkpointd.pipeline.write import dedup"),
    (layers_go_down, "client/checkpointd_client/capture/a.py", "from checkpointd_client import saver"),
    (layers_go_down, "client/checkpointd_client/restore/stored.py", "from checkpointd_client.restore.plan import Restoration"),
    (layers_go_down, "checkpointd/novel/a.py", ""),
    (layers_go_down, "checkpointd/novel.py", ""),
    *((pure_packages_are_pure, "checkpointd/codec/a.py", f"import {name}") for name in ("asyncio", "os", "socket")),
    *((pure_packages_are_pure, "checkpointd/layout/a.py", f"import {name}") for name in ("pathlib", "time", "random")),
    *((pure_packages_are_pure, "checkpointd/commit/a.py", f"import {name}") for name in ("threading", "logging")),
    (pure_packages_are_pure, "checkpointd/codec/a.py", "import os.path as p"),
    (pure_packages_are_pure, "checkpointd/codec/a.py", "from concurrent.futures import ThreadPoolExecutor"),
    (pure_packages_are_pure, "checkpointd/codec/a.py", "import uvloop"),
    (pure_packages_are_pure, "checkpointd/commit/a.py", "from checkpointd.config import WriterConfig"),
    (pure_packages_are_pure, "checkpointd/commit/a.py", "from ..store import base"),
    (service_stands_alone, "checkpointd/pipeline/a.py", "END = '_optim_states.pt'"),
    (only_tests_use_testing, "checkpointd/pipeline/a.py", "from checkpointd.testing.simfs import SimStore"),
    (only_tests_use_testing, "client/checkpointd_client/a.py", "from checkpointd import testing"),
    (dependencies_are_declared, "checkpointd/store/a.py", "import obstore"),
    (dependencies_are_declared, "checkpointd/store/a.py", "import pytest"),
    (dependencies_are_declared, "checkpointd/store/a.py", "import psutil"),
    (dependencies_are_declared, "checkpointd/daemon/a.py", "import pytest"),
    (dependencies_are_declared, "client/checkpointd_client/a.py", "from deepspeed import zero"),
    (dependencies_are_declared, f"{DEEPSPEED}a.py", "import transformers"),
    (nothing_is_pickled, "checkpointd/store/a.py", "import pickle"),
    (nothing_is_pickled, "client/checkpointd_client/a.py", "from pickle import loads"),
    (nothing_is_pickled, "client/checkpointd_client/integrations/conversion/objects.py", "import torch\nx = torch.load(f)"),
    (nothing_is_pickled, "client/checkpointd_client/a.py", "import torch\nx = torch.load(f, weights_only=True)"),
    (nothing_is_pickled, "client/checkpointd_client/capture/torch_files.py", "import torch\ntorch.load(f)"),
    (nothing_is_pickled, f"{DEEPSPEED}checkpoint_engine.py", "import pickle"),
    (only_devices_names_cuda, "client/checkpointd_client/a.py", "import torch\ntorch.cuda.current_stream()"),
    (only_devices_names_cuda, "client/checkpointd_client/a.py", "from torch.cuda import Stream"),
    (nobody_sleeps, "tests/e2e/a.py", "import time\ntime.sleep(1)"),
    (nobody_sleeps, "client/checkpointd_client/a.py", "from time import sleep"),
    (environment_is_read_once, "checkpointd/cli/a.py", "import os\nos.environ['A']"),
    (environment_is_read_once, "checkpointd/cli/a.py", "import os\nos.getenv('A')"),
    (environment_is_read_once, "client/checkpointd_client/a.py", "from os import environ"),
    (only_the_cli_prints, "checkpointd/store/a.py", "print(1)"),
    (only_the_cli_prints, "client/checkpointd_client/a.py", "list(map(print, x))"),
    (suggested_commands_are_whole, "checkpointd/pipeline/a.py", "raise ValueError('`checkpointd verify` says how')"),
    (suggested_commands_are_whole, "client/checkpointd_client/a.py", "x = f'`checkpointd explain {tag}` says why'"),
    (suggested_commands_exist, "client/checkpointd_client/a.py", "x = command('ls', root)"),
    *((names_say_something, f"{SERVICE}/{name}.py", "") for name in ("utils", "helpers", "common", "manager", "misc")),
    (names_say_something, "tests/test_utils_codec.py", ""),
    (names_say_something, "client/checkpointd_client/helpers/arena.py", ""),
    (files_stay_small, "checkpointd/store/a.py", "\n" * (LINES_MAX + 1)),
]

GOOD: list[tuple[Rule, str, str]] = [
    (service_stands_alone, "client/checkpointd_client/a.py", "import torch"),
    (layers_go_down, "checkpointd/cli/a.py", "from checkpointd import __version__, errors\nimport checkpointd.store"),
    (layers_go_down, "checkpointd/store/a.py", "from .base import Store\nfrom ..errors import StoreError"),
    (layers_go_down, "checkpointd/pipeline/attempt.py", "from checkpointd.pipeline.shard import Shard"),
    (
        layers_go_down,
        "client/checkpointd_client/a.py",
        "from checkpointd_client.saves import handle\nimport checkpointd.config",
    ),
    (layers_go_down, "checkpointd/__init__.py", "from checkpointd.errors import CheckpointdError"),
    (pure_packages_are_pure, "checkpointd/commit/a.py", "import math\nimport numpy as np\nfrom ..layout import keys"),
    (pure_packages_are_pure, "checkpointd/pipeline/a.py", "import os"),
    (only_tests_use_testing, "tests/unit/a.py", "from checkpointd.testing import simfs"),
    (dependencies_are_declared, "checkpointd/testing/a.py", "import pytest\nimport hypothesis"),
    (dependencies_are_declared, "checkpointd/daemon/a.py", "import aiohttp, prometheus_client, psutil"),
    (dependencies_are_declared, "client/checkpointd_client/a.py", "import torch\nfrom . import arena\nimport checkpointd"),
    (nothing_is_pickled, "tests/a.py", "import pickle"),
    (nothing_is_pickled, "client/checkpointd_client/export/torch_file.py", "import torch\ntorch.save(x, f)"),
    (nothing_is_pickled, "client/checkpointd_client/unpickling/unpickler.py", "import pickle"),
    (nothing_is_pickled, "client/checkpointd_client/integrations/conversion/metadata_file.py", "import pickle"),
    (only_devices_names_cuda, DEVICES, "import torch\ntorch.cuda.cudart()"),
    (nobody_sleeps, "checkpointd/pipeline/a.py", "import asyncio, time\nawait asyncio.sleep(time.monotonic())"),
    (nobody_sleeps, "tests/a.py", "import time\ntime.sleep(0)"),
    (environment_is_read_once, "checkpointd/config.py", "import os\nos.environ"),
    (environment_is_read_once, "checkpointd/store/a.py", "import os\nos.open('a', 0)"),
    (only_the_cli_prints, "checkpointd/cli/a.py", "print(1)"),
    (suggested_commands_are_whole, "checkpointd/cli/a.py", 'def f():\n    """As `checkpointd verify` does."""'),
    (suggested_commands_are_whole, "checkpointd/cli/a.py", "x = command('verify', root)"),
    (suggested_commands_exist, "checkpointd/cli/a.py", "command('verify', root), command('--debug', 'list'), command(*words)"),
    (names_say_something, "checkpointd/commit/communal.py", ""),
    (files_stay_small, "checkpointd/store/a.py", "\n" * LINES_MAX),
]


def imported(known: Collection[str], source: Source) -> set[str]:
    """The modules among `known` that a file imports, at any depth and for types alike."""
    found = set()
    for _, name in source.imports:
        module = name if name in known else name.rpartition(".")[0]
        if module in known and module != source.module:
            found.add(module)
    return found


def test_no_module_leads_back_to_itself() -> None:
    """Imports inside functions and under TYPE_CHECKING count as any other."""
    shipped = {source.module: source for source in sources() if source.shipped}
    sorter = TopologicalSorter({name: imported(shipped, source) for name, source in shipped.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"a cycle of imports: {' <- '.join(error.args[1])}; move what both need into a module below them")


def test_a_cycle_is_seen() -> None:
    one = Source("checkpointd/store/one.py", "from checkpointd.store import two")
    two = Source("checkpointd/store/two.py", "if TYPE_CHECKING:\n    from checkpointd.store.one import X")
    known = {one.module, two.module}
    assert imported(known, one) == {two.module}
    assert imported(known, two) == {one.module}


def test_a_room_can_be_taken_in_at_a_glance() -> None:
    rooms = Counter(
        PurePosixPath(source.path).parent.as_posix() for source in sources() if source.shipped and "__init__" not in source.path
    )
    full = {room: count for room, count in rooms.items() if count > ROOM_FILES_MAX}
    assert not full, f"more than {ROOM_FILES_MAX} files: {full}; make a room of those that belong together"


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    before, _, after = page.partition("## Rooms")[2].partition("**The client")
    for top, packages in ((SERVICE, before), (CLIENT, after.partition("\n## ")[0])):
        rooms = {path.parent.relative_to(ROOT / top).as_posix() for path in (ROOT / top).rglob("*.py")}
        unnamed = sorted(room for room in rooms - {".", "integrations"} if f"`{room}/`" not in packages)
        assert not unnamed, f"docs/ARCHITECTURE.md does not say what is in {unnamed}"
    places = [place for top in (SERVICE, CLIENT, "") for place in (ROOT / top).glob("**/*.py" if top else "*.py")]
    known = [f"/{place.as_posix()}" for place in places]
    gone = [name for name in re.findall(r"`([\w/]+\.py)`", page) if not any(one.endswith(f"/{name}") for one in known)]
    assert [name for name in gone if not (ROOT / name).exists()] == []


TESTS_OF_MORE = {
    "cli/test_removed_by_hand.py": "every command, on a root below which somebody ran `rm -r`",
    "client/test_copied_tags.py": "loads and commands where somebody copied or renamed the directory of a tag",
    "client/test_files_removed_by_hand.py": "commands and retention where somebody removed the directory that shows files",
    "client/test_public_names.py": "every class that checkpointd_client exports",
    "client/test_hard_cases.py": "what would once have lost, torn or mixed a checkpoint, through the whole client",
    "doctor/test_judging.py": "every check that judges figures",
    "test_benchmark_bucket_requests.py": "benchmarks/bucket_requests.py, at its smallest size",
    "test_benchmark_costs.py": "benchmarks/costs.py and benchmarks/curves.py",
    "test_benchmark_goals.py": "benchmarks/goals.py, benchmarks/figures.py and benchmarks/document.py",
    "test_benchmark_history.py": "benchmarks/history.py, at its smallest size",
    "test_benchmark_neighbour.py": "benchmarks/neighbour_page.py",
    "test_benchmark_objects.py": "benchmarks/objects_page.py, its goals, and what benchmarks/seaweed.py reads",
    "test_benchmark_ranks.py": "benchmarks/ranks.py, at its smallest size",
    "test_benchmark_report.py": "benchmarks/report.py",
    "test_benchmark_sharded.py": "benchmarks/sharded_page.py",
    "test_golden.py": "stored bytes of this format, through all that reads them",
    "test_hostile.py": "roots that somebody made to do harm, through all that reads them",
}
"""Files of tests/unit that test more than one module, and what they test."""


def is_at_its_modules_path(path: PurePosixPath) -> bool:
    """Whether a test file below tests/unit is called as a module of the room at its path, alone or with an aspect of it."""
    parts = path.parent.parts
    room = ROOT.joinpath(CLIENT, *parts[1:]) if parts[:1] == ("client",) else ROOT.joinpath(SERVICE, *parts)
    name = path.stem.removeprefix("test_")
    known = {room.name, *(entry.stem for entry in room.iterdir())} if room.is_dir() else set()
    return any(name == one or name.startswith(f"{one}_") for one in known)


def test_unit_tests_stand_where_their_modules_do() -> None:
    unit = ROOT / "tests" / "unit"
    found = [PurePosixPath(path.relative_to(unit).as_posix()) for path in sorted(unit.rglob("test_*.py"))]
    astray = [str(path) for path in found if not is_at_its_modules_path(path) and str(path) not in TESTS_OF_MORE]
    assert not astray, f"{astray}: name each after its module, at the path of that; or list in TESTS_OF_MORE what it tests"
    assert set(TESTS_OF_MORE) <= {str(path) for path in found}
    assert not is_at_its_modules_path(PurePosixPath("store/test_nothing.py"))
    assert not is_at_its_modules_path(PurePosixPath("nowhere/test_base.py"))


ROOMS_TESTED_ELSEWHERE = {
    "client/checkpointd_client/integrations/ray": ("tests/integrations/ray/test_checkpointer.py",),
    "checkpointd/admin": ("tests/unit/cli/commands/test_gc.py", "tests/unit/cli/commands/admin/test_recover.py"),
    "checkpointd/testing": (
        "tests/contract/test_suite.py",
        "tests/simulation/test_simbucket.py",
        "tests/simulation/test_simdisk.py",
        "tests/simulation/test_simfs.py",
        "tests/simulation/test_simloop.py",
    ),
    "checkpointd/testing/job": ("tests/simulation/test_job.py", "tests/simulation/test_job_mutations.py"),
}
"""Rooms without a test at their path, and the tests that cover them."""


def test_every_room_has_tests_at_its_path_or_elsewhere() -> None:
    untested = set()
    for top, mirror in ((SERVICE, "tests/unit"), (CLIENT, "tests/unit/client")):
        for room in {path.parent for path in (ROOT / top).rglob("*.py") if not path.name.startswith("__")}:
            if not any((ROOT / mirror / room.relative_to(ROOT / top)).glob("test_*.py")):
                untested.add(room.relative_to(ROOT).as_posix())
    assert untested == set(ROOMS_TESTED_ELSEWHERE), "give each a test at its path, or list what covers it"
    assert [test for tests in ROOMS_TESTED_ELSEWHERE.values() for test in tests if not (ROOT / test).is_file()] == []


def names(cases: list[tuple[Rule, str, str]]) -> list[str]:
    return [f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(cases)]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=names(BAD))
def test_catches(rule: Rule, path: str, text: str) -> None:
    violations = list(rule(Source(path, text)))
    assert violations
    assert all("; instead: " in violation for violation in violations), "a ban names its replacement"


@pytest.mark.parametrize(("rule", "path", "text"), GOOD, ids=names(GOOD))
def test_allows(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text))) == []


def test_every_rule_is_shown_to_catch_and_to_allow() -> None:
    assert {rule for rule, _, _ in BAD} == {rule for rule, _, _ in GOOD} == set(RULES)


PROBE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({"torch", "checkpointd_client"} & set(sys.modules)))
"""


def loads(package: str, path: Path) -> list[str]:
    """Which of torch and the client a fresh interpreter holds after importing every module of `package`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, package],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_service_loads_without_torch() -> None:
    assert loads("checkpointd", ROOT) == []


def test_the_probe_sees_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "__init__.py").touch()
    (tmp_path / "serving" / "late.py").write_text("import torch")
    assert loads("serving", tmp_path) == ["torch"]
