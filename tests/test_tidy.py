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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
SERVICE, CLIENT, TESTS = "checkpointd", "client/checkpointd_client", "tests"
FOLDERS = (SERVICE, CLIENT, TESTS, "examples", "benchmarks", "docs")
LINES_MAX = 500

# A part of the service may import those of its own and of lower layers. `testing` may import all; nobody imports it.
LAYERS = {
    "commands": 0,
    "errors": 0,
    "arguments": 0,
    "layout": 1,
    "codec": 1,
    "commit": 1,
    "config": 1,
    "waits": 1,
    "store": 2,
    "pipeline": 3,
    "daemon": 4,
    "doctor": 5,
    "cli": 6,
    "__main__": 7,
    "testing": 7,
}
PURE = {"arguments", "layout", "codec", "commit"}
DEEPSPEED = "client/checkpointd_client/integrations/deepspeed/"
EXTRAS = {"testing": "test", "daemon": "serve"}
"""The extra whose dependencies a part of the service may import."""
# What a pure package may import from outside; of the service: `errors` and its own kind.
PURE_MODULES = {
    *("__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "copy", "dataclasses", "enum"),
    *("contextlib", "fractions", "functools", "graphlib", "hashlib", "heapq", "itertools", "json", "math", "numbers"),
    *("operator", "re", "string", "struct", "sys", "textwrap", "types", "typing", "unicodedata", "zlib"),
    *("msgspec", "numpy", "typing_extensions", "xxhash", "zstandard"),
}
ENVIRONMENT_READERS = {"checkpointd/config.py", "client/checkpointd_client/ranks.py"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CLIENT_FILES = "client/checkpointd_client/"
MAY_PICKLE: dict[str, set[str]] = {
    # Files for torch.load(weights_only=True), of tensors and DeepSpeed's own objects: on the way out.
    f"{CLIENT_FILES}torch_file.py": {"torch.save"},
    f"{DEEPSPEED}exporting.py": {"torch.save"},
    # DeepSpeed's own files, which are pickles: made and read as it does, or read by an unpickler that runs nothing.
    f"{CLIENT_FILES}files.py": {"pickle", "torch.save"},
    f"{DEEPSPEED}engine.py": {"torch.save", "torch.load"},
    f"{DEEPSPEED}unpickling.py": {"pickle", "torch.load"},
    # DCP's own bytes, and its `.metadata`, by an unpickler that allows its classes alone.
    f"{CLIENT_FILES}integrations/dcp/objects.py": {"torch.save", "torch.load(weights_only=True)"},
    f"{CLIENT_FILES}integrations/dcp/metadata_file.py": {"pickle"},
    # Objects in client_state, for those who ask for it.
    f"{CLIENT_FILES}pickled.py": {"torch.save", "torch.load"},
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
        names = [(node.lineno, ast.unparse(node)) for node in self.nodes if isinstance(node, ast.Attribute | ast.Name)]
        return names + self.imports


Rule = Callable[[Source], Iterator[str]]


def outside(name: str) -> str:
    return name.partition(".")[0]


def part_of(name: str) -> str | None:
    """The part of the service that an import names: "" for the package itself, None for anything else."""
    if outside(name) != "checkpointd":
        return None
    second = f"{name}.".split(".")[1]
    return second if second in LAYERS else ""


def service_stands_alone(source: Source) -> Iterator[str]:
    if source.part is None:
        return
    for line, name in source.imports:
        if outside(name) in ("torch", "checkpointd_client"):
            yield f"{line}: the service imports {name}; instead: let the client hand over bytes, names and numbers"


def layers_go_down(source: Source) -> Iterator[str]:
    if not source.part:
        return
    if source.part not in LAYERS:
        yield f"1: {source.part} has no layer; instead: give it its place in LAYERS of tests/test_tidy.py"
        return
    for line, name in source.imports:
        part = part_of(name)
        if part and LAYERS[part] > LAYERS[source.part]:
            yield f"{line}: {source.part} imports {name}, which is above it; instead: pass in what is needed"


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
    extra = "deepspeed" if source.path.startswith(DEEPSPEED) else EXTRAS.get(source.part or "")
    allowed = declared(extra) | own | sys.stdlib_module_names
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
    for node in source.nodes:
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called not in ("torch.load", "torch.save", "np.load", "numpy.load") or called in allowed:
            continue
        if "weights_only=True" not in ast.unparse(node) or f"{called}(weights_only=True)" not in allowed:
            yield f"{node.lineno}: {called} pickles; instead: raw bytes with a dtype and a shape"


def nobody_sleeps(source: Source) -> Iterator[str]:
    """`time.sleep(0)` only hands over the processor, so it may stay."""
    if not (source.shipped or source.package == TESTS):
        return
    imported = [line for line, name in source.imports if name == "time.sleep"]
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"]
    for line in imported + [call.lineno for call in calls if ast.unparse(call) != "time.sleep(0)"]:
        yield f"{line}: time.sleep; instead: wait for the state itself (Event, Future, Process.wait, a line of output)"


def environment_is_read_once(source: Source) -> Iterator[str]:
    if not source.shipped or source.path in ENVIRONMENT_READERS:
        return
    for line, name in source.uses:
        if name in ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"):
            yield f"{line}: {name}; instead: a field of checkpointd/config.py, or of the client's ranks.py, passed down"


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
        if is_text and "`checkpointd " in ast.unparse(node):
            yield f"{node.lineno}: a command in a message; instead: command(...) of checkpointd/commands.py, with root and tag"


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
    nobody_sleeps,
    environment_is_read_once,
    only_the_cli_prints,
    suggested_commands_are_whole,
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
    (layers_go_down, "checkpointd/store/a.py", "import checkpointd.pipeline.save"),
    (layers_go_down, "checkpointd/store/a.py", "from ..pipeline import save"),
    (layers_go_down, "checkpointd/pipeline/a.py", "if TYPE_CHECKING:\n    from checkpointd.cli import main"),
    (layers_go_down, "checkpointd/novel/a.py", ""),
    (layers_go_down, "checkpointd/novel.py", ""),
    *((pure_packages_are_pure, "checkpointd/codec/a.py", f"import {name}") for name in ("asyncio", "os", "socket")),
    *((pure_packages_are_pure, "checkpointd/layout/a.py", f"import {name}") for name in ("pathlib", "time", "random")),
    *((pure_packages_are_pure, "checkpointd/commit/a.py", f"import {name}") for name in ("threading", "logging")),
    (pure_packages_are_pure, "checkpointd/codec/a.py", "import os.path as p"),
    (pure_packages_are_pure, "checkpointd/codec/a.py", "from concurrent.futures import ThreadPoolExecutor"),
    (pure_packages_are_pure, "checkpointd/codec/a.py", "import aiofiles"),
    (pure_packages_are_pure, "checkpointd/commit/a.py", "from checkpointd.config import WriterConfig"),
    (pure_packages_are_pure, "checkpointd/commit/a.py", "from ..store import base"),
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
    (nothing_is_pickled, "client/checkpointd_client/integrations/dcp/objects.py", "import torch\nx = torch.load(f)"),
    (nothing_is_pickled, "client/checkpointd_client/a.py", "import torch\nx = torch.load(f, weights_only=True)"),
    (nothing_is_pickled, "client/checkpointd_client/files.py", "import torch\ntorch.load(f)"),
    (nothing_is_pickled, f"{DEEPSPEED}engine.py", "import pickle"),
    (nobody_sleeps, "tests/e2e/a.py", "import time\ntime.sleep(1)"),
    (nobody_sleeps, "client/checkpointd_client/a.py", "from time import sleep"),
    (environment_is_read_once, "checkpointd/cli/a.py", "import os\nos.environ['A']"),
    (environment_is_read_once, "checkpointd/cli/a.py", "import os\nos.getenv('A')"),
    (environment_is_read_once, "client/checkpointd_client/a.py", "from os import environ"),
    (only_the_cli_prints, "checkpointd/store/a.py", "print(1)"),
    (only_the_cli_prints, "client/checkpointd_client/a.py", "list(map(print, x))"),
    (suggested_commands_are_whole, "checkpointd/pipeline/a.py", "raise ValueError('`checkpointd verify` says how')"),
    (suggested_commands_are_whole, "client/checkpointd_client/a.py", "x = f'`checkpointd explain {tag}` says why'"),
    *((names_say_something, f"{SERVICE}/{name}.py", "") for name in ("utils", "helpers", "common", "manager", "misc")),
    (names_say_something, "tests/test_utils_codec.py", ""),
    (names_say_something, "client/checkpointd_client/helpers/arena.py", ""),
    (files_stay_small, "checkpointd/store/a.py", "\n" * (LINES_MAX + 1)),
]

GOOD: list[tuple[Rule, str, str]] = [
    (service_stands_alone, "client/checkpointd_client/a.py", "import torch"),
    (layers_go_down, "checkpointd/cli/a.py", "from checkpointd import __version__, errors\nimport checkpointd.store"),
    (layers_go_down, "checkpointd/store/a.py", "from .base import Store\nfrom ..errors import StoreError"),
    (layers_go_down, "checkpointd/__init__.py", "from checkpointd.errors import CheckpointdError"),
    (pure_packages_are_pure, "checkpointd/commit/a.py", "import math\nimport numpy as np\nfrom ..layout import keys"),
    (pure_packages_are_pure, "checkpointd/pipeline/a.py", "import os"),
    (only_tests_use_testing, "tests/unit/a.py", "from checkpointd.testing import simfs"),
    (dependencies_are_declared, "checkpointd/testing/a.py", "import pytest\nimport hypothesis"),
    (dependencies_are_declared, "checkpointd/daemon/a.py", "import aiohttp, prometheus_client, psutil"),
    (dependencies_are_declared, "client/checkpointd_client/a.py", "import torch\nfrom . import arena\nimport checkpointd"),
    (nothing_is_pickled, "tests/a.py", "import pickle"),
    (nothing_is_pickled, "client/checkpointd_client/torch_file.py", "import torch\ntorch.save(x, f)"),
    (nothing_is_pickled, "client/checkpointd_client/integrations/dcp/objects.py", "torch.load(f, weights_only=True)"),
    (nothing_is_pickled, "client/checkpointd_client/integrations/dcp/metadata_file.py", "import pickle"),
    (nobody_sleeps, "checkpointd/pipeline/a.py", "import asyncio, time\nawait asyncio.sleep(time.monotonic())"),
    (nobody_sleeps, "tests/a.py", "import time\ntime.sleep(0)"),
    (environment_is_read_once, "checkpointd/config.py", "import os\nos.environ"),
    (environment_is_read_once, "checkpointd/store/a.py", "import os\nos.open('a', 0)"),
    (only_the_cli_prints, "checkpointd/cli/a.py", "print(1)"),
    (suggested_commands_are_whole, "checkpointd/cli/a.py", 'def f():\n    """As `checkpointd verify` does."""'),
    (suggested_commands_are_whole, "checkpointd/cli/a.py", "x = command('verify', root)"),
    (names_say_something, "checkpointd/commit/communal.py", ""),
    (files_stay_small, "checkpointd/store/a.py", "\n" * LINES_MAX),
]


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
