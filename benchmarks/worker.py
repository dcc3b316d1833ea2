"""The process of one rank: started by `launch.py`, never by hand.

Kept apart and empty, because writer processes that a system spawns import their parent's main file again.
"""

if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    # Behind the installed packages: what is measured is the installed project, not the tree around this file.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

    from benchmarks.rank import Job, main

    main(Job(**json.loads(sys.argv[1])))
