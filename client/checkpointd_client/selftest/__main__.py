"""`python -m checkpointd_client.selftest`: the command `checkpointd doctor --device`, in the environment that trains."""

from __future__ import annotations

import sys

from checkpointd.cli import run

if __name__ == "__main__":
    sys.exit(run(["doctor", "--device", *sys.argv[1:]]))
