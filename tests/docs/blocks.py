"""The blocks of code in a page of the documentation, and the comments before them that say how they are run.

Every block names its language. The runner runs `python`, `console` (commands after `$`, and what they print), and `bash`; it
reads `json`, `toml` and `yaml`; and it leaves `text`, `mermaid`, `ini` and the site's directives alone. A comment in front of
a block, `<!-- not run: needs Slurm -->`, skips it for that reason. A reason may name tests that run it: these must exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = frozenset({"python", "console", "bash"})
READ = frozenset({"json", "toml", "yaml"})
LEFT_ALONE = frozenset({"text", "mermaid", "ini", "{toctree}", "{eval-rst}"})

_COMMENT = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->", re.DOTALL)
_TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text, and why it is not run (None where it is)."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every README, CONTRIBUTING, and every page of docs."""
    readmes = [REPOSITORY / folder / "README.md" for folder in (".", "benchmarks", "deploy", "examples")]
    return [*readmes, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: str, text: str) -> Iterator[Block]:
    """The blocks of one page, in their order."""
    before: Token | None = None
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):  # an indented block names no language
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content, _reason(before))
        if token.nesting == 0:
            before = token
        elif token.type.endswith("_open"):
            before = None


def missing_tests(reason: str) -> list[str]:
    """The tests that a reason names and that do not exist."""
    found = []
    for name in _TEST.findall(reason):
        path, _, function = name.partition("::")
        file = REPOSITORY / path
        if not file.is_file() or (function and f"def {function}(" not in file.read_text(encoding="utf-8")):
            found.append(name)
    return found


def _reason(before: Token | None) -> str | None:
    """What the comment directly before a block says."""
    if before is None or before.type != "html_block":
        return None
    found = _COMMENT.search(before.content)
    return " ".join(found[1].split()) if found else None
