"""Checks of arguments. Each raises UsageError with the argument's name, its value and the allowed values."""

from __future__ import annotations

import math
import operator
import posixpath
import re
import sys
from collections.abc import Sequence

from checkpointd.errors import UsageError

TIMEOUT_S_MAX = 30 * 86400.0
_VARIABLE = re.compile(r"(?:\A|/)\$[A-Za-z_]\w*(?=/|\Z)|\$\{\w+\}")
"""A variable that looks like one, even if it is not set: as the whole name of a directory, or in braces."""


def shown(value: object, most: int = 80) -> str:
    """`value` as Python writes it, in at most `most` characters. Some values cannot be written, such as very large numbers."""
    try:
        return f"{value!r:.{most}}"
    except Exception as error:  # the user's classes may raise anything
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def whole(name: str, value: object, *, least: int = 1, most: float = math.inf) -> None:
    """Accept an int of at least `least` and at most `most`, but no bool."""
    if type(value) is not int or value < least:
        raise UsageError(f"{name} is {shown(value)}; it must be a whole number, {least} or more")
    if value > most:
        raise UsageError(f"{name} is {shown(value)}; choose {most} or less")


def counted(name: str, value: object, *, least: int = 0, most: float = math.inf) -> int:
    """The int that `value` stands for: itself, or a whole number of numpy or torch, such as a counter in a tensor. Raises as
    `whole`.
    """
    is_flag = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        number: object = value if is_flag else operator.index(value)  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError, RuntimeError):
        number = value
    whole(name, number, least=least, most=most)
    assert isinstance(number, int)  # whole() looked
    return number


def seconds(name: str, value: object, *, most: float = math.inf, zero: bool = False) -> None:
    """Accept a finite number of seconds, greater than 0 (with `zero`: 0 or more) and at most `most`, but no bool."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= sys.float_info.max or (number == 0 and not zero):
        bound = "0 or more" if zero else "greater than 0"
        raise UsageError(f"{name} is {shown(value)}; it must be a number of seconds, {bound}")
    if number > most:
        raise UsageError(f"{name} is {shown(value)}; choose {most:g} ({most / 86400:g} days) or less")


def flag(name: str, value: object) -> None:
    """Accept True or False, but no other value that counts as true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value)}; it must be True or False")


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Accept one of `options`."""
    if not isinstance(value, str) or value not in options:
        raise UsageError(f"{name} is {shown(value)}; choose one of {', '.join(options)}")


def path(name: str, value: object) -> None:
    """Accept a str, or an os.PathLike of a str, that can be the path of a file, and for which nothing needs to be expanded."""
    text = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} is {shown(value)}; it must be a path")
    try:
        is_possible = b"\0" not in text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise UsageError(
            f"{name} is {shown(value)}; it must be a path, without a NUL or other characters that no file name can have"
        )
    expanded(text)


def expanded(text: str) -> str:
    """Accept a path or URL without a `~` or a variable that only a shell expands: a directory `$HOME` would be made.

    A URL may hold a secret by mistake, so the message does not repeat it.
    """
    if text.startswith("~"):
        name, meant = text.split("/")[0], posixpath.expanduser(text)
        give = f"give {meant!r}" if meant != text else "there is no such user here. Give the path"
        raise UsageError(
            f"{text!r} starts with {name!r}, and only a shell expands it: {give}, or './{text}' for that very name"
        )
    meant, found = posixpath.expandvars(text), _VARIABLE.search(text)
    is_url = "://" in text
    if meant != text:
        give = "give what os.path.expandvars() makes of it" if is_url else f"give {meant!r}, or os.path.expandvars() of it"
    elif found is not None:
        give = f"{found[0].strip('/')} is not set here"
    else:
        return text
    where = "the URL" if is_url else repr(text)
    raise UsageError(f"{where} has a variable that only a shell replaces: {give}. No directory of a path may have such a name")
