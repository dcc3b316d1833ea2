"""Runs the blocks of one page in their order, so that one may build on those before it.

A page has a folder of its own. The paths that pages use (`/mnt/...`, `/run/checkpointd/...`) are made below it, and so is the
working directory, where `examples` is. `before/PAGE.py` (for a README, `before/FOLDER.py`) makes the things that the page takes
for granted; a page without one gets `before/training.py`, a model and its optimizer. It is run in the page's Python before the
first block, and its WORDS say what stands for words such as ROOT in commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import IO

import yaml

from tests.docs.blocks import REPOSITORY, Block
from tests.docs.output import agrees

BEFORE = Path(__file__).with_name("before")
LIMIT_S = 200
AS_ROOT = " --uid 0" if os.geteuid() == 0 else ""
MARK = "--- the next command ---"


def before_of(page: str) -> Path:
    """The module with what the page takes for granted."""
    name = page.removesuffix("/README.md").removesuffix(".md").rpartition("/")[2].lower()
    return next(path for path in (BEFORE / f"{name}.py", BEFORE / "training.py") if path.exists())


class Session:
    """One page: its folder, its Python, and the daemons that its commands started."""

    def __init__(self, page: str) -> None:
        # A short path: a Unix socket's may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="page-"))
        (self.folder / "run" / "checkpointd").mkdir(parents=True, mode=0o700)
        (self.folder / "mnt" / "ckpts").mkdir(parents=True)
        (self.folder / "work").mkdir()
        (self.folder / "work" / "examples").symlink_to(REPOSITORY / "examples")
        self.environment = {
            **os.environ,
            # The environment with the frameworks lies over .venv, and has no torchrun of its own.
            "PATH": f"{Path(sys.executable).parent}:{REPOSITORY / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        }
        self.before = before_of(page)
        self.words: dict[str, str] = {}
        self.python: subprocess.Popen[str] | None = None
        self.daemons: list[subprocess.Popen[str]] = []
        self.errors: IO[str] = (self.folder / "stderr").open("w+", encoding="utf-8")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.python is not None:
            self.python.communicate(timeout=LIMIT_S)  # it ends with its input
        for daemon in self.daemons:
            daemon.terminate()
            daemon.communicate(timeout=LIMIT_S)
        self.errors.close()
        shutil.rmtree(self.folder)

    def run(self, block: Block) -> str | None:
        """What is wrong with the block; None where it does what the page says."""
        if block.language in {"python", "console", "bash"} and self.python is None:
            self._run_before()
        text = self._placed(block.text)
        match block.language:
            case "python":
                return self._run_python(block.page, block.line + 1, text)
            case "console":
                return self._run_console(text)
            case "bash":
                return self._run_bash(text)
            case "json":
                json.loads(text)
            case "toml":
                tomllib.loads(text)
            case "yaml":
                list(yaml.safe_load_all(text))
        return None

    def _placed(self, text: str) -> str:
        """The text with its paths below the page's folder, and no port that another test may have."""
        text = re.sub(r"(?<![\w.])/(mnt|run/checkpointd)/", rf"{self.folder}/\1/", text)
        return text.replace("127.0.0.1:9733", "127.0.0.1:0")

    # --- Python --------------------------------------------------------------------------------------------------

    def _run_before(self) -> None:
        error = self._run_python(str(self.before), 1, self._placed(self.before.read_text(encoding="utf-8")))
        assert error is None, f"what {self.before.name} prepares for its page fails:\n{error}"

    def _run_python(self, file: str, line: int, source: str) -> str | None:
        if self.python is None:
            command = [sys.executable, "-m", "tests.docs.interpreter"]
            self.python = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                cwd=self.folder / "work",
                env=self.environment,
            )
        assert self.python.stdin is not None
        assert self.python.stdout is not None
        self.python.stdin.write(json.dumps({"file": file, "line": line, "source": source}) + "\n")
        self.python.stdin.flush()
        answer = self.python.stdout.readline()
        if not answer:
            return f"Python ended with code {self.python.wait(LIMIT_S)}:\n{(self.folder / 'stderr').read_text()[-4000:]}"
        said = json.loads(answer)
        self.words = said["words"]
        error: str | None = said["error"]
        return error

    # --- commands ------------------------------------------------------------------------------------------------

    def _run_console(self, text: str) -> str | None:
        session = commands(text)
        # One shell for all, as at a terminal; a mark after each command tells their outputs apart.
        script = "".join(f"{command}\necho {MARK}\n" for command, _ in session)
        code, printed = self._shell(script)
        outputs = printed.split(f"{MARK}\n")
        for (command, shown), output in zip(session, outputs, strict=False):
            if shown and not agrees(shown, output):
                return f"$ {command}\nprinted:\n{output}\nwhere the page shows:\n{shown}"
        return f"ended with code {code}:\n{printed}" if code else None

    def _run_bash(self, text: str) -> str | None:
        if "checkpointd serve " in text:
            return self._start_daemon(text)
        code, printed = self._shell(text)
        return f"ended with code {code}:\n{printed}" if code else None

    def _shell(self, script: str) -> tuple[int, str]:
        """The exit code of a script that ends at the first command that fails, and all that it printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._worded(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder / "work",
            env=self.environment,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout.replace(str(self.folder), "")

    def _worded(self, script: str) -> str:
        """The script with what the page's words stand for."""
        for word, meaning in self.words.items():
            script = re.sub(rf"\b{word}\b", meaning, script)
        return script

    def _start_daemon(self, text: str) -> str | None:
        """Start the one that the text asks for; it serves until the page ends. To root's own jobs only where that is said."""
        script = re.sub("^checkpointd serve", f"exec checkpointd serve{AS_ROOT}", self._worded(text), flags=re.MULTILINE)
        daemon = subprocess.Popen(
            ["bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=self.folder / "work",
            env=self.environment,
        )
        self.daemons.append(daemon)
        assert daemon.stdout is not None
        if daemon.stdout.readline().startswith("ready at "):
            return None
        return f"ended with code {daemon.wait(LIMIT_S)}:\n{(self.folder / 'stderr').read_text()[-4000:]}"


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a console session, each with what it shows of its output. A backslash continues a command."""
    found: list[tuple[str, str]] = []
    continued = False
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif not found:
            raise ValueError(f"a console session begins with `$ `, not with {line!r}")
        elif continued:
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        continued = line.endswith("\\") and not found[-1][1]
    return found
