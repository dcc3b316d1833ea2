"""Opens files that somebody else put there: a pipe or a device in the place of a file would block, or never end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """The regular file at `path`, open for reading.

    OSError as of open(): of EINVAL if it is of another kind, of ENOENT if no file can have this name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or text that the file system's encoding does not have
        raise FileNotFoundError(errno.ENOENT, "No file can have this name", os.fspath(path)) from error
    file = open(descriptor, "rb")  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return file
