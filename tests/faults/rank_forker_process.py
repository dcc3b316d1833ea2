"""The process of rank_forker.py: imports the slow modules once, then forks ranks of jobs.

    rank_forker_process.py MODULE SOCKET

A rank is asked for on the socket, with its environment as a line of JSON and its standard input, output and error; answered
are its process id and, once it has ended, its exit code, a line each. It ends when its own standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading

from tests.faults.commanded_rank import serve

DESCRIPTORS = 3
"""Standard input, output and error of a rank."""
MESSAGE_BYTES_MAX = 1 << 20


def main(name: str, path: str) -> None:
    module = importlib.import_module(name)
    assert threading.active_count() == 1, "threads cannot be forked"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while _is_asked(listening):
            line, _ = listening.accept()
            message, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES_MAX, DESCRIPTORS)
            while not message.endswith(b"\n"):
                message += line.recv(MESSAGE_BYTES_MAX)
            if os.fork() == 0:
                listening.close()
                if _rank_of(line, descriptors):
                    os.environ.clear()
                    os.environ.update(json.loads(message))
                    serve(module.Rank)
                return
            line.close()
            for descriptor in descriptors:
                os.close(descriptor)


def _is_asked(listening: socket.socket) -> bool:
    """Wait until a rank is asked for; False where nobody is there any more who could."""
    ready, _, _ = select.select([listening, sys.stdin], [], [])
    return sys.stdin not in ready


def _rank_of(line: socket.socket, descriptors: list[int]) -> bool:
    """Fork the rank, in which this is true. The process in between says its id and its exit code, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rank = os.fork()
    if rank == 0:
        line.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return True
    for descriptor in (*descriptors, 1):
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):
        line.sendall(b"%d\n" % rank)
        _, status = os.waitpid(rank, 0)
        line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
