"""Every block of code in the documentation does what its page says."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.docs.blocks import LEFT_ALONE, READ, REPOSITORY, RUN, Block, blocks, missing_tests, pages
from tests.docs.output import agrees
from tests.docs.session import Session, commands

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

PAGES = {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in pages()}
BLOCKS = [block for page, text in PAGES.items() for block in blocks(page, text)]
GATE = {"README.md", "docs/index.md"}
"""The pages that everybody reads first. The night runs the blocks of all; what is only read is read in the gate as well."""
assert PAGES.keys() >= GATE


def marks(block: Block) -> list[pytest.MarkDecorator]:
    """Those of a page go to one worker, in their order."""
    group = pytest.mark.xdist_group(f"docs-{block.page}")
    return [group] if block.page in GATE or block.language in READ else [group, pytest.mark.nightly]


class Runner:
    """Runs the blocks of the pages; before a block all those above it in its page, so that any one can be asked for alone.

    A block that is only read needs none above it.
    """

    def __init__(self) -> None:
        self.page: str | None = None
        self.session: Session | None = None
        self.results: dict[Block, str | None] = {}

    def run(self, block: Block) -> str | None:
        if block.page != self.page:
            self.close()
            self.page, self.session = block.page, Session(block.page)
        assert self.session is not None
        for earlier in BLOCKS if block.language in RUN else [block]:
            if (
                earlier.page == block.page
                and earlier.line <= block.line
                and earlier not in self.results
                and not earlier.not_run
            ):
                self.results[earlier] = self.session.run(earlier)
        return self.results[block]

    def close(self) -> None:
        if self.session is not None:
            self.session.__exit__()
            self.session = None


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=block.name, marks=marks(block)) for block in BLOCKS if block.language in RUN | READ],
)
def test_block(block: Block, runner: Runner) -> None:
    if block.not_run:
        pytest.skip(f"not run: {block.not_run}")
    error = runner.run(block)
    if error is not None:
        pytest.fail(f"{block.name}:\n{error}", pytrace=False)


def test_every_block_names_a_language_that_the_runner_knows() -> None:
    unknown = [f"{block.name}: {block.language!r}" for block in BLOCKS if block.language not in RUN | READ | LEFT_ALONE]
    assert unknown == []


def test_no_command_hides_in_a_block_that_is_left_alone() -> None:
    hidden = [
        block.name
        for block in BLOCKS
        if block.language in LEFT_ALONE and not block.not_run
        if any(line.startswith(("$ ", "checkpointd ", "python ", "make ", "pip ")) for line in block.text.splitlines())
    ]
    assert hidden == []


def test_the_tests_that_a_reason_names_exist() -> None:
    assert {block.name: missing for block in BLOCKS if (missing := missing_tests(block.not_run or ""))} == {}


# --- the runner itself --------------------------------------------------------------------------------------------------


def test_a_comment_before_a_block_says_why_it_is_not_run() -> None:
    text = "Words.\n\n<!-- not run:\n  needs Slurm -->\n```bash\nsbatch job\n```\n\n- An item:\n  ```python\n  x = 1\n  ```\n"
    first, second = blocks("page.md", text)
    assert (first.line, first.language, first.not_run) == (5, "bash", "needs Slurm")
    assert (second.line, second.text, second.not_run) == (10, "x = 1\n", None)


def test_a_reason_that_names_a_missing_test_is_found() -> None:
    assert missing_tests("tests/docs/test_blocks.py::test_block runs it, not tests/docs/test_other.py::test_x") == [
        "tests/docs/test_other.py::test_x"
    ]


def test_a_session_is_read_as_commands_with_their_output() -> None:
    text = "$ one \\\n    more\nshown\n$ two\n"
    assert commands(text) == [("one \\\n    more", "shown\n"), ("two", "")]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 3.19", "loss 3.20", True),
        ("loss 3.19", "loss 3.40", False),
        ("in 0.84 s at step 8", "in 17.1 s at step 8", True),
        ("in 0.84 s at step 8", "in 0.84 s at step 9", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("newest ... ago", "newest 3 of 4 ago", True),
        ("one  two", "one two\n", True),
        ("one", "one\ntwo", False),
    ],
)
def test_what_counts_as_the_output_that_is_shown(shown: str, printed: str, same: bool) -> None:
    assert agrees(shown, printed) is same


@pytest.mark.nightly
def test_a_block_that_fails_says_where() -> None:
    with Session("page.md") as session:
        assert session.run(Block("page.md", 7, "python", "x = 1\n")) is None
        error = session.run(Block("page.md", 11, "python", "y = x\nz\n"))
        assert error is not None
        assert 'File "page.md", line 13' in error
        assert session.run(Block("page.md", 20, "console", "$ echo here\nhere\n")) is None
        error = session.run(Block("page.md", 20, "console", "$ echo here\nthere\n"))
        assert error is not None
        assert "where the page shows:\nthere" in error
        error = session.run(Block("page.md", 30, "bash", "false\ntrue\n"))
        assert error is not None
        assert "ended with code 1" in error
