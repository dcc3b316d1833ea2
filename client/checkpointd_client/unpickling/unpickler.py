"""Reads pickles without running anything that they name: plain values, and a Record for each other object.

Python's own unpickler does the reading; `find_class` gives it Records only. It is the one in Python, since that one can be told
which opcodes there are, and does not allocate what an opcode merely announces. `Builder` then replaces the Records of known
kinds by values.

Invariants
  PICKLE-1  Nothing that a pickle names is imported or called, and it changes nothing of this process. While it is read, there
      are only plain values and Records. Only the makers of the caller are called, afterwards, by name, with values that this
      pickle made.
  PICKLE-2  A pickle of n bytes takes O(n) time and memory: it makes at most OBJECTS_MAX containers and memo entries, and
      beside FREE_OBJECTS at most one for BYTES_PER_OBJECT bytes. It nests no deeper than DEPTH_MAX. Its repeated
      references unfold to at most UNFOLDED_MAX values, or 16 times the values that it holds. No list or dict contains itself.
      No int has more than 255 bytes, so it is quick to multiply, and Python shows it as text.
  PICKLE-3  Keys are quick to hash and to compare. Any other key is replaced by a Record, which equals no other key.

pickletools.dis shows what a file holds.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from checkpointd_client.unpickling.records import PickleFault, PickleLimit, Record

OBJECTS_MAX = 4_000_000
FREE_OBJECTS = 1 << 18
BYTES_PER_OBJECT = 4
DEPTH_MAX = 200
UNFOLDED_MAX = 1 << 20
KEY_ITEMS_MAX = 64
CLASHES_MAX = 4096
PERSISTENT = "persistent id"
"""The name of the Record of a persistent id, whose arguments are the parts of the id. No class has a name without a dot."""
_NAME_MAX = 512

Makers = Mapping[str, Callable[..., Any]]
Opcode = Callable[[Any], None]


def read(
    data: bytes,
    makers: Makers,
    *,
    constants: Mapping[str, Any] = MappingProxyType({}),
    check_name: Callable[[str], None] = lambda _: None,
    into_records: bool = False,
) -> Any:
    """Read the pickle `data`. Raises PickleFault if it is damaged, and the errors of `makers` and `check_name`.

    A call of `<module>.<name>` becomes the result of the maker of that name, or a Record; a persistent id the result of the
    maker PERSISTENT. `constants` are the values of names that are not called. `check_name` gets every name. With
    `into_records` the contents of Records are built, too, and the limits of PICKLE-2 hold for them; without it, they stay as
    they were read, and the caller must not unfold them.
    """
    keys = _Keys({type(value) for value in constants.values()})
    try:
        found = _Unpickler(data, keys, check_name).load()
        return _Builder(keys, makers, constants, into_records=into_records).build(found)
    except PickleFault:
        raise
    except EOFError as error:
        raise PickleFault("the pickle is cut off") from error
    except (pickle.UnpicklingError, LookupError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise PickleFault(f"the pickle is damaged: {error!r:.999}") from error


class _Keys:
    """Replaces keys that are slow to hash or to compare by Records (PICKLE-3)."""

    def __init__(self, constants: set[type]) -> None:
        self._types = frozenset({type(None), str, bytes, int, float, bool, Record}) | constants
        self._first_of_hash: dict[int, Any] = {}
        self._clashes = 0

    def checked(self, key: Any) -> Any:
        """`key`, or a Record in its place."""
        todo, left = [key], KEY_ITEMS_MAX
        while todo and left > 0:
            item = todo.pop()
            left -= 1
            if isinstance(item, tuple) and len(item) <= left:
                todo.extend(item)
            elif type(item) not in self._types or (type(item) is int and item.bit_length() > 64):
                left = 0  # millions of such ints can have one hash
        if todo or not left or (isinstance(key, tuple) and self._is_one_clash_too_many(key)):
            return Record(f"{type(key).__name__} as a key", (key,))
        return key

    def _is_one_clash_too_many(self, key: tuple[Any, ...]) -> bool:
        """Whether `key` is one of too many tuples with the same hash, which would all be compared with each other."""
        if self._first_of_hash.setdefault(hash(key), key) == key:
            return False
        self._clashes += 1
        return self._clashes > CLASHES_MAX


class _Opcodes(dict[int, Opcode]):
    def __missing__(self, code: int) -> Opcode:
        raise PickleFault(f"opcode {code:#04x} is not one that torch.save writes")


class _Unpickler(pickle._Unpickler):
    """Knows the opcodes of protocols 2 to 5 but for extensions and buffers outside the pickle, and counts what they make."""

    # typeshed does not know these.
    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes, keys: _Keys, check_name: Callable[[str], None]) -> None:
        super().__init__(io.BytesIO(data))
        self._keys, self._check_name = keys, check_name
        self._names: dict[str, Record] = {}
        self._left = min(OBJECTS_MAX, FREE_OBJECTS + len(data) // BYTES_PER_OBJECT)

    def find_class(self, module: str, name: str) -> Record:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in self._names:
            if len(full) > _NAME_MAX:
                raise PickleFault(f"it names a class of {len(full)} characters")
            self._check_name(full)
            self._names[full] = Record(full, None)
        return self._names[full]

    def persistent_load(self, pid: Any) -> Record:
        return Record(PERSISTENT, pid if type(pid) is tuple else (pid,))

    def count(self) -> None:
        """One more container or memo entry."""
        self._left -= 1
        if self._left < 0:
            raise PickleLimit("it holds so many objects for its size that they would take too much memory")

    def deepen(self) -> None:
        """One more mark."""
        if len(self.metastack) >= DEPTH_MAX:
            raise PickleLimit(f"it nests deeper than {DEPTH_MAX}")

    def call(self) -> None:
        """REDUCE and NEWOBJ: a Record of the call, which is not made."""
        args = self.stack.pop()
        self._call(args)

    def call_with_keywords(self) -> None:
        """NEWOBJ_EX: the same; the last argument is the dict of keywords."""
        keywords, args = self.stack.pop(), self.stack.pop()
        self._call((args, keywords))

    def _call(self, args: Any) -> None:
        function = self.stack[-1]
        if type(function) is not Record or function.args is not None or type(args) is not tuple:
            raise PickleFault("it calls something that is not a name")
        self.stack[-1] = Record(function.name, args)

    def check_key(self) -> None:
        """The key of the last pair."""
        self.stack[-2] = self._keys.checked(self.stack[-2])

    def check_pairs(self) -> None:
        """The keys of the pairs above the last mark."""
        self.stack[::2] = map(self._keys.checked, self.stack[::2])

    def check_items(self) -> None:
        """The items of a set above the last mark."""
        self.stack[:] = map(self._keys.checked, self.stack)
        self.count()

    def refuse_number(self) -> None:
        """LONG4, an int of more than 255 bytes."""
        raise PickleLimit("it holds a number of more than 255 bytes")

    def bytearray8(self) -> None:
        """BYTEARRAY8, whose own method allocates what it announces."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))


def _theirs(*names: str) -> Iterator[tuple[int, Opcode]]:
    for name in names:
        code = getattr(pickle, name)[0]
        yield code, pickle._Unpickler.dispatch[code]


def _after(first: Opcode, *names: str) -> Iterator[tuple[int, Opcode]]:
    """The opcodes `names`, each of which does `first` before its own work."""
    for code, load in _theirs(*names):

        def act(unpickler: Any, load: Opcode = load) -> None:
            first(unpickler)
            load(unpickler)

        yield code, act


_Unpickler.dispatch = _Opcodes(
    [
        *_theirs("PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE"),
        *_theirs("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *_theirs("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *_theirs("POP", "POP_MARK", "DUP", "BINPUT", "BINGET", "LONG_BINGET"),
        *_theirs("EMPTY_TUPLE", "APPEND", "APPENDS", "BUILD", "GLOBAL", "STACK_GLOBAL", "BINPERSID"),
        *_after(_Unpickler.deepen, "MARK"),
        *_after(_Unpickler.count, "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *_after(_Unpickler.count, "MEMOIZE", "LONG_BINPUT"),
        *_after(_Unpickler.check_key, "SETITEM"),
        *_after(_Unpickler.check_pairs, "SETITEMS"),
        *_after(_Unpickler.check_items, "ADDITEMS", "FROZENSET"),
        (pickle.REDUCE[0], _Unpickler.call),
        (pickle.NEWOBJ[0], _Unpickler.call),
        (pickle.NEWOBJ_EX[0], _Unpickler.call_with_keywords),
        (pickle.BYTEARRAY8[0], _Unpickler.bytearray8),
        (pickle.LONG4[0], _Unpickler.refuse_number),
    ]
)
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


# --- after it was read ------------------------------------------------------------------------------------------------


class _Builder:
    """Replaces the Records of known kinds by values, from the leaves to the root, and bounds depth and size (PICKLE-2)."""

    def __init__(self, keys: _Keys, makers: Makers, constants: Mapping[str, Any], *, into_records: bool) -> None:
        self._keys, self._makers, self._constants, self._into_records = keys, makers, constants, into_records
        self._built: dict[int, Any] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        """How many values a container unfolds to, and how many levels it has."""
        self._held = 0

    def build(self, found: Any) -> Any:
        """What `found` stands for."""
        open_: set[int] = set()
        todo: list[tuple[Any, bool]] = [(found, False)]
        while todo:
            value, is_left = todo.pop()
            number = id(value)
            if is_left:
                open_.discard(number)
                self._measure(value)
                self._built[number] = self._made(value)
            elif number in open_:
                raise PickleLimit(f"a {type(value).__name__} contains itself")
            elif number not in self._sizes and self._has_content(value):
                open_.add(number)
                todo.append((value, True))
                todo.extend((child, False) for child in _children(value) if type(child) in _CONTAINERS)
        return self._of(found)

    def _has_content(self, value: Any) -> bool:
        """Whether it is a container that is built here. Other Records stay as they are, and may refer to themselves."""
        if type(value) is not Record:
            return type(value) in _CONTAINERS
        return value.args is not None and (self._into_records or value.name in self._makers or value.name in _KINDS)

    def _measure(self, value: Any) -> None:
        unfolded, depth, children = 1, 0, _children(value)
        for child in children:
            size, below = self._sizes.get(id(child)) or (_weight(child), 0)
            unfolded, depth = unfolded + size, max(depth, below)
        self._sizes[id(value)] = unfolded, depth + 1
        self._held += 1 + len(children)
        if depth >= DEPTH_MAX:
            raise PickleLimit(f"it nests deeper than {DEPTH_MAX}")
        if unfolded > max(UNFOLDED_MAX, 16 * self._held):
            raise PickleLimit("it refers to its own parts so often that it would unfold without end")

    def _of(self, value: Any) -> Any:
        """The value that was built from `value`, whose content was built before."""
        if type(value) is Record and value.args is None:
            return self._constants.get(value.name, value)
        return self._built.get(id(value), value) if type(value) in _CONTAINERS else value

    def _key(self, key: Any) -> Any:
        """The same for a key, which was checked as it was read."""
        built = self._of(key)
        return key if built == key else self._keys.checked(built)

    def _made(self, value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind(map(self._of, value))
        if kind is set or kind is frozenset:
            return kind(map(self._key, value))
        if kind is dict:
            return {self._key(key): self._of(child) for key, child in value.items()}
        return self._replaced(value, tuple(map(self._of, value.args)))

    def _replaced(self, record: Record, args: tuple[Any, ...]) -> Any:
        items, maker = record.items, self._makers.get(record.name)
        if record.name in _KINDS:
            return self._filled(_KINDS[record.name], args, items)
        if maker is None:
            record.args, record.state, record.items = args, self._of(record.state), self._of(items)
            return record
        if items or record.state is not None:
            raise PickleFault(f"{record.name} is changed after it was made, which torch.save never does")
        return maker(*args)

    def _filled(self, kind: type, args: tuple[Any, ...], items: list[tuple[Any, Any]]) -> Any:
        """A container of a class of Python's. Attributes, such as `_metadata` of a module's state, are no part of it."""
        [given] = args or ((),)
        if kind is set or kind is frozenset:
            return kind(map(self._keys.checked, given))
        made = kind()
        for key, child in given.items() if type(given) is dict else given:
            made[self._keys.checked(key)] = child
        for key, child in items:
            made[self._key(key)] = self._of(child)
        return made


_KINDS: dict[str, type] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
}
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, Record})


def _children(value: Any) -> Collection[Any]:
    if type(value) is Record:
        return (value.args or (), value.state, value.items)
    if type(value) is dict:
        return [*value, *value.values()]
    return value  # type: ignore[no-any-return]  # a list, tuple or set


def _weight(value: Any) -> int:
    """The weight of a leaf; a long one weighs more, since it may be referred to often."""
    return 1 + (len(value) >> 6) if isinstance(value, str | bytes | bytearray) else 1
