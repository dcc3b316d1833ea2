"""The process of one rank: started by `launch.py` with the module that holds its `Job` and `main`, never by hand.

Kept apart and empty, because writer processes that a system spawns import their parent's main file again.
"""

if __name__ == "__main__":
    import importlib
    import json
    import sys
    from pathlib import Path

    # Behind the installed packages: what is measured is the installed project, not the tree around this file.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

    module = importlib.import_module(sys.argv[1])
    module.main(module.Job(**json.loads(sys.argv[2])))
