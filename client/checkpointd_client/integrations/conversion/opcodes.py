"""Reads pickles without running anything that they name: plain values, and a Record for each other object.

Invariants
  PICKLE-1  Nothing that a pickle names is imported or called, and it changes nothing of this process. Only the makers of the
      caller are called, by name, with values that this pickle made.
  PICKLE-2  Opcodes (APPEND, SETITEM, ADDITEMS, BUILD) only change lists, dicts, sets and Records that this pickle made itself.
  PICKLE-3  A pickle of n bytes takes O(n) time and memory, makes at most OBJECTS_MAX containers, and nests no deeper than
      DEPTH_MAX. Its repeated references unfold to at most UNFOLDED_MAX values, or 16 times the values that it holds. No list or
      dict contains itself. Makers copy at most 16 times the length of the pickle, plus COPIED_MAX.
  PICKLE-4  Keys are quick to hash and to compare. Any other key is replaced by a Record, which equals no other key.

The opcodes are those of protocols 2 to 5. pickletools.dis shows what a file holds.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from checkpointd_client.integrations.conversion.records import DEPTH_MAX, PickleFault, PickleLimit, Record, check_shape

OBJECTS_MAX = 4_000_000
KEY_ITEMS_MAX = 64
CLASHES_MAX = 4096
COPIED_MAX = 1 << 16
_NAME_MAX = 512


Makers = Mapping[str, Callable[..., Any]]
Persistent = Callable[[Any], Any]


def read(
    data: bytes,
    makers: Makers,
    *,
    constants: Mapping[str, Any] = MappingProxyType({}),
    persistent: Persistent | None = None,
    check_name: Callable[[str], None] = lambda _: None,
    into_records: bool = False,
) -> Any:
    """Read the pickle `data`. Raises PickleFault if it is damaged, and the errors of `makers`, `persistent` and `check_name`.

    A call of `<module>.<name>` becomes the result of the maker of that name, or a Record. `constants` are the values of names
    that are not called. `persistent` returns the value of a persistent id; `check_name` gets every name. With `into_records`
    the limits of PICKLE-3 also hold for the contents of Records; without it, the caller must not unfold these.
    """
    try:
        found = _Machine(data, makers, constants, persistent, check_name).run()
    except PickleFault:
        raise
    except (IndexError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise PickleFault(f"the pickle is damaged: {error!r}") from error
    check_shape(found, into_records=into_records)
    return found


_ABSENT = object()
_U2, _I4, _U4, _U8, _F8 = (struct.Struct(form).unpack_from for form in ("<H", "<i", "<I", "<Q", ">d"))


class _Machine:
    """The stack machine. Each opcode is a method that moves `at` past its argument."""

    def __init__(
        self,
        data: bytes,
        makers: Makers,
        constants: Mapping[str, Any],
        persistent: Persistent | None,
        check_name: Callable[[str], None],
    ) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[str, Any] = dict(constants)
        self.made = 0
        self.copied_left = 16 * len(data) + COPIED_MAX
        self.key_types = _KEY_TYPES | {type(value) for value in constants.values()}
        self.first_of_hash: dict[int, Any] = {}
        self.clashes = 0
        self.makers, self.persistent, self.check_name = makers, persistent, check_name

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                [found] = self._all()
                return found
            act = table[code]
            if act is None:
                raise PickleFault(f"opcode {code:#04x} at byte {self.at - 1} is not one that torch.save writes")
            act(self)

    def _all(self) -> list[Any]:
        if self.below or len(self.stack) != 1:
            raise PickleFault("it does not end in one value")
        return self.stack

    def _take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise PickleFault(f"it is cut off: {size} bytes are announced at byte {start}")
        return self.data[start : self.at]

    def _number(self, unpack: Callable[..., tuple[Any, ...]], size: int) -> Any:
        (value,) = unpack(self.data, self.at)
        self.at += size
        return value

    def _push_new(self, value: Any) -> None:
        self.made += 1
        if self.made > OBJECTS_MAX:
            raise PickleLimit(f"it holds more than {OBJECTS_MAX} containers")
        self.stack.append(value)

    def _marked(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    # --- values ----------------------------------------------------------------------------------------------------

    def proto(self) -> None:
        if not 2 <= self.data[self.at] <= 5:
            raise PickleFault(f"it has protocol {self.data[self.at]}; protocols 2 to 5 are known")
        self.at += 1

    def frame(self) -> None:
        self.at += 8

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def int1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def int2(self) -> None:
        self.stack.append(self._number(_U2, 2))

    def int4(self) -> None:
        self.stack.append(self._number(_I4, 4))

    def long1(self) -> None:
        self.at += 1
        self.stack.append(int.from_bytes(self._take(self.data[self.at - 1]), "little", signed=True))

    def long4(self) -> None:
        self.stack.append(int.from_bytes(self._take(self._number(_U4, 4)), "little", signed=True))

    def float8(self) -> None:
        self.stack.append(self._number(_F8, 8))

    def text1(self) -> None:
        self.at += 1
        self.stack.append(str(self._take(self.data[self.at - 1]), "utf-8", "surrogatepass"))

    def text4(self) -> None:
        self.stack.append(str(self._take(self._number(_U4, 4)), "utf-8", "surrogatepass"))

    def text8(self) -> None:
        self.stack.append(str(self._take(self._number(_U8, 8)), "utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self.at += 1
        self.stack.append(self._take(self.data[self.at - 1]))

    def bytes4(self) -> None:
        self.stack.append(self._take(self._number(_U4, 4)))

    def bytes8(self) -> None:
        self.stack.append(self._take(self._number(_U8, 8)))

    def bytearray8(self) -> None:
        self._push_new(bytearray(self._take(self._number(_U8, 8))))

    # --- the stack and the memo -----------------------------------------------------------------------------------

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []
        if len(self.below) > DEPTH_MAX:
            raise PickleLimit(f"it nests deeper than {DEPTH_MAX}")

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._marked()

    def pop_mark(self) -> None:
        self._marked()

    def dup(self) -> None:
        self.stack.append(self.stack[-1])

    def put1(self) -> None:
        self.memo[self.data[self.at]] = self.stack[-1]
        self.at += 1

    def put4(self) -> None:
        self.memo[self._number(_U4, 4)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get1(self) -> None:
        self._get(self.data[self.at])
        self.at += 1

    def get4(self) -> None:
        self._get(self._number(_U4, 4))

    def _get(self, number: int) -> None:
        if number not in self.memo:
            raise PickleFault(f"it refers to {number}, which it did not remember")
        self.stack.append(self.memo[number])

    # --- containers -----------------------------------------------------------------------------------------------

    def new_list(self) -> None:
        self._push_new([])

    def new_dict(self) -> None:
        self._push_new({})

    def new_set(self) -> None:
        self._push_new(set())

    def new_tuple(self) -> None:
        self.stack.append(())

    def tuple_(self) -> None:
        self._push_new(tuple(self._marked()))

    def tuple1(self) -> None:
        self._push_new((self.stack.pop(),))

    def tuple2(self) -> None:
        second = self.stack.pop()
        self._push_new((self.stack.pop(), second))

    def tuple3(self) -> None:
        third, second = self.stack.pop(), self.stack.pop()
        self._push_new((self.stack.pop(), second, third))

    def append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def appends(self) -> None:
        values = self._marked()
        self._extend(values)

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            target = self._made_record(target, "appended to").items
        target.extend(values)

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([(key, value)])

    def setitems(self) -> None:
        flat = self._marked()
        if len(flat) % 2:
            raise PickleFault("a key without a value")
        self._set(zip(flat[::2], flat[1::2], strict=True))

    def _set(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        target = self.stack[-1]
        if type(target) is dict or type(target) is OrderedDict:
            for key, value in pairs:
                target[key if type(key) is str else self._key(key)] = value
        else:
            self._made_record(target, "given items").items.extend(pairs)

    def additems(self) -> None:
        values = self._marked()
        target = self.stack[-1]
        if type(target) is not set:
            raise PickleFault(f"a {type(target).__name__} is added to")
        target.update(map(self._key, values))

    def frozenset_(self) -> None:
        self._push_new(frozenset(map(self._key, self._marked())))

    def _key(self, key: Any) -> Any:
        """`key`, or a Record that replaces it (PICKLE-4)."""
        todo, left = [key], KEY_ITEMS_MAX
        while todo and left > 0:
            item = todo.pop()
            left -= 1
            if isinstance(item, tuple) and len(item) <= left:
                todo.extend(item)
            elif type(item) not in self.key_types or (type(item) is int and item.bit_length() > 64):
                left = 0  # millions of such ints can have one hash
        if todo or not left or (isinstance(key, tuple) and self._clashes(key)):
            return Record(f"{type(key).__name__} as a key", (key,))
        return key

    def _clashes(self, key: tuple[Any, ...]) -> bool:
        """Whether `key` is one of too many tuples with the same hash, which would all be compared with each other."""
        number = hash(key)
        if self.first_of_hash.setdefault(number, key) != key:
            self.clashes += 1
        return self.clashes > CLASHES_MAX

    # --- names ----------------------------------------------------------------------------------------------------

    def global_(self) -> None:
        ends = [self.data.index(b"\n", self.at, self.at + _NAME_MAX)]
        ends.append(self.data.index(b"\n", ends[0] + 1, ends[0] + 1 + _NAME_MAX))
        module, name = self.data[self.at : ends[0]], self.data[ends[0] + 1 : ends[1]]
        self.at = ends[1] + 1
        self._name(module.decode(), name.decode())

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (type(name) is str and type(module) is str and len(name) + len(module) < 2 * _NAME_MAX):
            raise PickleFault("a class whose name is not text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{_RENAMED.get(module, module)}.{name}"
        found = self.names.get(full, _ABSENT)
        if found is _ABSENT:
            self.check_name(full)
            found = self.names[full] = Record(full, None)
        self.stack.append(found)

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self._call(function, args)

    def _call(self, function: Any, args: Any) -> None:
        if type(function) is not Record or function.args is not None or type(args) is not tuple:
            raise PickleFault("it calls something that is not a name")
        maker, kind = self.makers.get(function.name), _KINDS.get(function.name)
        if kind is not None and len(args) < 2:
            made = self._filled(kind(), *args)
        else:
            made = Record(function.name, args) if maker is None else maker(*args)
        if type(made) is bytes or type(made) is bytearray or type(made) is str:
            self.copied_left -= len(made)
        elif isinstance(made, tuple | set | dict):
            self.copied_left -= 16 * len(made)
        if self.copied_left < 0:
            raise PickleLimit("it copies its own parts so often that it would take too much memory")
        self._push_new(made)

    def _filled(self, target: Any, items: Any = ()) -> Any:
        if type(target) is set:
            target.update(map(self._key, items))
        else:
            for key, value in items.items() if type(items) is dict else items:
                target[self._key(key)] = value
        return target

    def call_with_keywords(self) -> None:
        keywords = self.stack.pop()
        self.call()
        made = self.stack[-1]
        if type(made) is not Record or type(keywords) is not dict:
            raise PickleFault("keywords for a function that takes none")
        made.items.extend(keywords.items())

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is OrderedDict:
            return  # attributes of the dict, such as `_metadata` of a module's state: not part of its content
        self._made_record(target, "given a state").state = state

    def _made_record(self, target: Any, what: str) -> Record:
        if type(target) is not Record or target.args is None:
            named = target.name if type(target) is Record else type(target).__name__
            raise PickleFault(f"{named} is {what}, which is not an object that this pickle made")
        return target

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise PickleFault("it refers to something outside the file")
        self.stack.append(self.persistent(self.stack.pop()))


_KEY_TYPES = frozenset({type(None), str, bytes, int, float, bool, Record})
_KINDS: dict[str, type] = {
    "builtins.set": set,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
}
"""Containers that are filled here, because their keys must be checked."""
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OPCODES: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.proto,
    b"\x95": _Machine.frame,
    b"N": _Machine.none,
    b"\x88": _Machine.true,
    b"\x89": _Machine.false,
    b"K": _Machine.int1,
    b"M": _Machine.int2,
    b"J": _Machine.int4,
    b"\x8a": _Machine.long1,
    b"\x8b": _Machine.long4,
    b"G": _Machine.float8,
    b"\x8c": _Machine.text1,
    b"X": _Machine.text4,
    b"\x8d": _Machine.text8,
    b"C": _Machine.bytes1,
    b"B": _Machine.bytes4,
    b"\x8e": _Machine.bytes8,
    b"\x96": _Machine.bytearray8,
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"1": _Machine.pop_mark,
    b"2": _Machine.dup,
    b"q": _Machine.put1,
    b"r": _Machine.put4,
    b"\x94": _Machine.memoize,
    b"h": _Machine.get1,
    b"j": _Machine.get4,
    b"]": _Machine.new_list,
    b"}": _Machine.new_dict,
    b"\x8f": _Machine.new_set,
    b")": _Machine.new_tuple,
    b"t": _Machine.tuple_,
    b"\x85": _Machine.tuple1,
    b"\x86": _Machine.tuple2,
    b"\x87": _Machine.tuple3,
    b"a": _Machine.append,
    b"e": _Machine.appends,
    b"s": _Machine.setitem,
    b"u": _Machine.setitems,
    b"\x90": _Machine.additems,
    b"\x91": _Machine.frozenset_,
    b"c": _Machine.global_,
    b"\x93": _Machine.stack_global,
    b"R": _Machine.call,
    b"\x81": _Machine.call,
    b"\x92": _Machine.call_with_keywords,
    b"b": _Machine.build,
    b"Q": _Machine.persistent_id,
}
_TABLE = [_OPCODES.get(bytes([code])) for code in range(256)]
