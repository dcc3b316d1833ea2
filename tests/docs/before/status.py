"""What STATUS takes for granted: a daemon that serves."""

import atexit
import os
import subprocess

daemon = subprocess.Popen(
    [
        "checkpointd",
        "serve",
        "--root",
        "/mnt/ckpts",
        "--socket",
        "/run/checkpointd/checkpointd.sock",
        "--uid",
        str(os.getuid()),
    ],
    stdout=subprocess.PIPE,
    text=True,
)
atexit.register(daemon.communicate)
atexit.register(daemon.terminate)  # first
assert daemon.stdout is not None
assert daemon.stdout.readline().startswith("ready at ")
