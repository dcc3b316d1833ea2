"""Ctrl-C at a chosen line of a program."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, Self


class Interruption:
    """Within its block, raises KeyboardInterrupt in this thread at the so-many-th line of the code that `wanted` accepts.

    Each line counts at its first visit. A `try:` alone does not count: there Python looks for no signals, and its own `with`
    would not see the exception. The block ends quietly; `happened` says whether there were so many lines.
    """

    def __init__(self, number: int, wanted: Callable[[CodeType], bool]) -> None:
        self.happened = False
        self.place = ""
        self._number, self._wanted = number, wanted
        self._seen: set[tuple[CodeType, int]] = set()
        self._error: KeyboardInterrupt | None = None

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        sys.settrace(None)
        return error is not None and error is self._error

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        code, line = frame.f_code, frame.f_lineno
        if not self._wanted(code):
            return None
        if event != "line" or (code, line) in self._seen or self.happened:
            return self._trace
        text = linecache.getline(code.co_filename, line).strip()
        if text != "try:":
            self._seen.add((code, line))
            if len(self._seen) == self._number:
                self.happened, self.place = True, f"{code.co_qualname}: {text}"
                self._error = KeyboardInterrupt(self.place)
                raise self._error
        return self._trace
