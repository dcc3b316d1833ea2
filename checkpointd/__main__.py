"""`python -m checkpointd`: the command line."""

from __future__ import annotations

from checkpointd.cli import main

if __name__ == "__main__":
    main()
