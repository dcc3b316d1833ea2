"""Code run in a process of another user, by number: whether there is a name for it does not matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

_PROGRAM = """
import encodings.ascii, fcntl, json, os, sys
import numpy
from checkpointd.store.posix.store import PosixStore
uid, gid, *groups = json.loads(sys.argv[1])
os.setgroups(groups)
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
argv = sys.argv[2:]
def run():
{code}
try:
    answer = run()
except Exception as error:
    answer = [type(error).__name__, str(error)]
print(json.dumps(answer))
"""


def run_as(code: str, *arguments: object, uid: int, gid: int | None = None, groups: Sequence[int] = ()) -> Any:
    """What `code` returns, as JSON, or the name of its exception, with the message. Its arguments are in `argv`.

    The process imports what it needs before it takes the user's rights: the interpreter may lie where only root reaches it.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _PROGRAM.format(code=textwrap.indent(code, "    ")),
            json.dumps([uid, uid if gid is None else gid, *groups]),
            *map(str, arguments),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
