"""CLASSES-1 and CLASSES-2: classes are found among the imported modules, or named; and no code runs for it."""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture import scalars
from checkpointd_client.capture.plain import classes
from checkpointd_client.capture.plain.classes import StoredMember


class Phase(enum.Enum):
    WARMUP = 1
    MAIN = ("main", 2)
    START = 1  # noqa: PIE796  # an alias, as enums may have


class Level(enum.IntEnum):
    LOW = 1


class Name(enum.StrEnum):
    ADAM = enum.auto()


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    EXECUTE = 4


class Mode(enum.IntFlag, boundary=enum.KEEP):
    A = 1
    B = 2


class Nested:
    class Kind(enum.Enum):
        ONE = 1


class Careful(enum.Flag):
    READ = 1
    WRITE = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError(f"code of the user's ran for {value}")


class Point(NamedTuple):
    x: int
    y: int


class Spaced(collections.namedtuple("Spaced", "x y")):
    """A subclass without slots, as people write them."""

    def __new__(cls, x: int, y: int) -> Spaced:
        raise AssertionError(f"code of the user's ran for {x} and {y}")


MEMBERS = [
    Phase.WARMUP,
    Phase.MAIN,
    Phase.START,
    Level.LOW,
    Name.ADAM,
    Access.READ,
    Access.READ | Access.EXECUTE,
    Access(0),
    ~Access.READ,
    Mode.A | Mode.B,
    Mode(9),
    Nested.Kind.ONE,
]


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_member_comes_back_as_the_same_object(member: enum.Enum) -> None:
    node = tree.decode(tree.encode(scalars.encode(member, "v")))
    assert isinstance(node, tree.Member)
    assert scalars.decode(node) is member
    assert scalars.decode_key(node) is member


def test_combined_flags_are_made_by_pythons_own_code() -> None:
    node = tree.Member(__name__, "Careful", "READ|WRITE", 3)
    found = scalars.decode(node)
    assert type(found) is Careful
    assert found.value == 3


@pytest.fixture
def job() -> Iterator[types.ModuleType]:
    """The module `job` with the classes that a checkpoint names."""
    module = types.ModuleType("job")
    sys.modules["job"] = module
    yield module
    sys.modules.pop("job", None)


def _stage(**members: object) -> type[enum.Enum]:
    made: Any = enum.Enum("Stage", members, module="job")
    return made


STAGE = tree.Member("job", "Stage", "ONE", 1)


def test_a_class_that_is_not_imported_is_named_with_what_to_do() -> None:
    with pytest.raises(StateError, match=r"class job\.Stage .*import job before the load"):
        scalars.decode(STAGE)
    assert scalars.decode(STAGE, stand_in=True) == StoredMember("job.Stage", "ONE", 1)
    assert scalars.key_text(scalars.decode_key(STAGE, stand_in=True)) == "Stage.ONE"


def test_a_class_that_moved_is_found_under_its_old_name(job: Any) -> None:
    with pytest.raises(StateError, match=r"the module has no class of that name\. If the class has moved"):
        scalars.decode(STAGE)
    job.Stage = _stage(ONE=1)
    assert scalars.decode(STAGE) is job.Stage.ONE


def test_the_class_of_the_value_that_is_there_is_used(job: Any) -> None:
    cls = _stage(ONE=1)
    assert scalars.decode(STAGE, known=cls) is cls.__members__["ONE"]
    with pytest.raises(StateError, match="has no class of that name"):
        scalars.decode(STAGE, known=Phase)


@pytest.mark.parametrize(
    ("members", "words"), [({"ONE": 2}, r"had the value 1 .*now it has 2"), ({"TWO": 1}, "without the member ONE = 1")]
)
def test_a_member_that_is_another_one_now_is_refused(job: Any, members: dict[str, object], words: str) -> None:
    job.Stage = _stage(**members)
    with pytest.raises(StateError, match=words):
        scalars.decode(STAGE)
    assert scalars.decode(STAGE, stand_in=True) == StoredMember("job.Stage", "ONE", 1)


def test_flags_whose_bits_have_other_names_now_are_refused() -> None:
    with pytest.raises(StateError, match=r"without the member READ\|DELETE = 3"):
        scalars.decode(tree.Member(__name__, "Access", "READ|DELETE", 3))
    with pytest.raises(StateError, match="without the member"):
        scalars.decode(tree.Member(__name__, "Access", None, 64))


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("os", "system"),
        ("os", "path"),
        ("os", "path.join"),
        ("builtins", "eval"),
        ("builtins", "int"),
        ("builtins", "type"),
        ("subprocess", "Popen"),
        (__name__, "Phase.__class__"),
        (__name__, "Phase.WARMUP"),
        (__name__, "Phase.__dict__"),
        (__name__, "Point"),
        (__name__, "Lazy.Kind"),
        ("", ""),
    ],
)
def test_a_file_that_names_anything_but_an_enum_gets_nothing(module: str, qualname: str) -> None:
    with pytest.raises(StateError, match=r"does not have the class|no enum class"):
        scalars.decode(tree.Member(module, qualname, "system", 1))
    if qualname != "Point":
        with pytest.raises(StateError, match=r"does not have the class|no class of named tuples"):
            classes.namedtuple_class(module, qualname, ("x", "y"))


class Watched(type):
    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"code of the user's ran for {name}")


class Lazy(metaclass=Watched):
    Kind = 1


class LazyModule(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the module would import itself for {name}")


def test_a_module_that_imports_itself_on_demand_is_not_woken() -> None:
    sys.modules["job"] = LazyModule("job")
    try:
        with pytest.raises(StateError, match="the module has no class of that name"):
            scalars.decode(STAGE)
    finally:
        del sys.modules["job"]


def test_what_is_no_module_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "job", types.SimpleNamespace(Stage=_stage(ONE=1)))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="has no class of that name"):
        scalars.decode(STAGE)


def test_a_value_that_no_enum_holds_is_refused() -> None:
    with pytest.raises(FormatError, match="not a scalar"):
        scalars.decode(tree.Member(__name__, "Phase", "MAIN", tree.Tensor("w")))


def test_a_named_tuple_needs_the_fields_that_are_stored() -> None:
    assert classes.namedtuple_class(__name__, "Point", ("x", "y")) is Point
    with pytest.raises(StateError, match=r"now a named tuple of \(x, y\), and one of \(x, z\) is stored"):
        classes.namedtuple_class(__name__, "Point", ("x", "z"))


def test_what_has_fields_by_name_is_a_named_tuple() -> None:
    assert classes.is_namedtuple(Point(1, 2))
    assert classes.is_namedtuple(tuple.__new__(Spaced, (1, 2)))
    assert not classes.is_namedtuple((1, 2))
    assert not classes.is_namedtuple(sys.version_info)
