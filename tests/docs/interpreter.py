"""Runs the Python blocks of one page, one after the other in one namespace: a process of its own, as a reader's would be.

Each line of standard input is a block as JSON: `file`, `line` (of its first line), `source`. Each line of its answers has
`error` (a traceback, or null) and `words`: what stands for words in commands. What blocks print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def main() -> None:
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
