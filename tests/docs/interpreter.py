"""Runs the Python blocks of pages, each page in a process of its own, as a reader's would be.

    python -m tests.docs.interpreter SOCKET

It imports torch once, which takes longer than most pages do, and forks a process for each page that the socket asks for. A
message is the page's folder and environment as JSON, with the files that are the process's standard input, output and error.

Each line of a page's standard input is a block as JSON: `file`, `line` (of its first line), `source`. Each line of its answers
has `error` (a traceback, or null) and `words`: what stands for words in commands. What blocks print goes to standard error.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from tests.docs.blocks import REPOSITORY

MESSAGE_BYTES_MAX = 128 << 10


class Interpreters:
    """The Pythons of pages. Leaving it waits for their ends."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.docs.interpreter", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, folder: Path, environment: Mapping[str, str], errors: IO[str]) -> Python:
        """A new one, in `folder`."""
        message = json.dumps([str(folder), dict(environment)]).encode()
        assert len(message) <= MESSAGE_BYTES_MAX
        (its_input, blocks), (answers, its_answers) = os.pipe(), os.pipe()
        socket.send_fds(self._socket, [message], [its_input, its_answers, errors.fileno()])
        os.close(its_input)
        os.close(its_answers)
        return Python(os.fdopen(blocks, "w"), os.fdopen(answers))


class Python:
    """The Python of one page. It ends with its input."""

    def __init__(self, blocks: IO[str], answers: IO[str]) -> None:
        self._blocks, self._answers = blocks, answers

    def run(self, file: str, line: int, source: str) -> dict[str, Any] | None:
        """Its answer to a block; None where it has ended."""
        try:
            self._blocks.write(json.dumps({"file": file, "line": line, "source": source}) + "\n")
            self._blocks.flush()
        except BrokenPipeError:
            return None
        answer = self._answers.readline()
        return json.loads(answer) if answer else None

    def close(self) -> None:
        """Wait for its end."""
        self._blocks.close()
        self._answers.read()
        self._answers.close()


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    import torch._dynamo  # noqa: F401 (optimizers import it at their first step)

    import checkpointd_client.core  # noqa: F401

    while True:
        message, files, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 3)
        if not message:
            break
        if os.fork() == 0:
            asked.close()
            begin(*json.loads(message), files)
            run_blocks()
            return
        for file in files:
            os.close(file)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def begin(folder: str, environment: dict[str, str], files: list[int]) -> None:
    """As a process that was started in the folder, with the environment and the files."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = folder


def run_blocks() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a block prints is no answer
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line in sys.stdin:
        block = json.loads(line)
        error = None
        try:
            # The empty lines before it make a traceback point at the line in the page.
            exec(compile("\n" * (block["line"] - 1) + block["source"], block["file"], "exec"), namespace)
        except BaseException:  # SystemExit as well: a block does not end its page
            error = traceback.format_exc()
        answers.write(json.dumps({"error": error, "words": namespace.get("WORDS", {})}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
