"""Names: what may be one, that each thing has one name only, and that none leads out of its attempt."""

from __future__ import annotations

import enum

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checkpointd.errors import FormatError, UsageError
from checkpointd.layout import keys
from checkpointd.layout.keys import AttemptId
from checkpointd.store.names import is_key

ranks = st.integers(0, 9_999_999)
attempts = st.builds(AttemptId, st.integers(0, 10**12 - 1), st.integers(0, 10**9 - 1))
names = st.text(st.characters(codec="utf-8") | st.sampled_from("0123456789-./\\.chunksindexvote\u0663\u00b2\n\0"), max_size=30)


@pytest.mark.parametrize("tag", ["global_step1", "best", "a b", "步骤", "x" * 200, "a.b", "0", "émile", "100%", "-rf"])
def test_tags_that_are_directory_names(tag: str) -> None:
    assert keys.check_tag(tag) == tag
    assert keys.is_tag(tag)


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("", "empty"),
        ("a/b", "slash"),
        ("a\\b", "slash"),
        ("..", "dot"),
        (".", "dot"),
        (".checkpointd", "dot"),
        ("a\nb", "cannot be printed"),
        ("a\x7f", "cannot be printed"),
        (" a", "white space"),
        ("a\u2003", "white space"),
        ("latest", "pointer"),
        ("a\u200b", "cannot be printed"),
        ("a\ud800", "cannot be printed"),
        ("x" * 201, "longer than 200 bytes"),
        ("é" * 101, "longer than 200 bytes"),
    ],
)
def test_tags_that_cannot_be_say_why_and_what_could_be(tag: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        keys.check_tag(tag)
    assert f"use a plain name such as {'b' if tag == 'a/b' else 'global_step100'!r}" in str(caught.value)
    assert not keys.is_tag(tag)


def test_a_text_is_a_tag_in_one_spelling_only() -> None:
    """Some file systems take both for one name."""
    with pytest.raises(UsageError, match="another spelling of the same text") as caught:
        keys.check_tag("e\u0301mile")
    assert "use a plain name such as '\u00e9mile'" in str(caught.value)
    assert keys.is_tag("\u00e9mile")


@pytest.mark.parametrize("tag", [None, 7, b"best"])
def test_a_tag_that_is_no_string_is_refused_by_its_type(tag: object) -> None:
    with pytest.raises(UsageError, match=f"not {type(tag).__name__}"):
        keys.check_tag(tag)  # type: ignore[arg-type]  # what is shown


@given(st.text(max_size=210))
def test_whatever_is_a_tag_makes_keys_that_every_store_accepts(tag: str) -> None:
    if keys.is_tag(tag):
        prefix = keys.attempt_prefix(tag, AttemptId(1, 0))
        assert prefix.split("/") == [tag, "00000001-0"]
        assert is_key(f"{prefix}/{keys.vote_name(0)}")


@given(attempts)
def test_an_attempt_is_named_and_found_again(attempt: AttemptId) -> None:
    assert AttemptId.parse(str(attempt)) == attempt


@given(names)
@example("000000001-0")
@example("00000001-00")
@example("0000001-0")
@example("\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661-0")
@example("00000001-0\n")
@example("00000001--1")
def test_no_other_spelling_names_an_attempt(name: str) -> None:
    found = AttemptId.parse(name)
    assert found is None or str(found) == name


@pytest.mark.parametrize(("rank", "group"), [(0, 0), (255, 0), (256, 1), (300, 1), (16_383, 63), ((1 << 18) - 1, 1023)])
def test_the_objects_of_256_ranks_share_a_directory(rank: int, group: int) -> None:
    for name in (keys.index_name(rank), keys.vote_name(rank), keys.read_back_name(rank), keys.file_name(rank, 2)):
        folder = f"tag/00000001-0/{group}" if group else "tag/00000001-0"
        assert keys.object_key("tag/00000001-0", name) == f"{folder}/{name}"
        assert keys.holder_of(keys.object_key("tag/00000001-0", name)) == "tag/00000001-0"
    assert keys.is_group(str(group)) == (group > 0)
    ballot = keys.ballot_name("0" * 32)
    assert keys.object_key("tag/00000001-0", ballot) == f"tag/00000001-0/{ballot}"


@pytest.mark.parametrize("name", ["0", "01", "-1", "1 ", "1\n", "\u0661", "10000", "outcome", ""])
def test_no_other_spelling_names_a_group(name: str) -> None:
    assert not keys.is_group(name)


@given(ranks, st.sampled_from((0, 1)), st.integers(0, keys.FILES_MAX - 1))
def test_every_object_of_a_rank_is_known_as_its_own(rank: int, part: int, number: int) -> None:
    chunks, index, file = keys.chunks_name(rank, part), keys.index_name(rank), keys.file_name(rank, number)
    for name in (chunks, index, file, keys.vote_name(rank)):
        assert keys.check_object_name(name) == name
        assert keys.object_rank(name) == rank
        assert keys.vote_rank(name) == (rank if name.endswith(".vote") else None)
    assert (keys.index_rank(index), keys.index_rank(chunks)) == (rank, None)
    assert [keys.check_chunks_ref(name, rank) for name in (chunks, file)] == [chunks, file]


@pytest.mark.parametrize("name", ["00000-2.chunks", "00000-00.chunks", "00000-1.index", "00000-0-1.file", "00000-01.file"])
def test_a_shard_has_one_writer_and_its_objects_one_name(name: str) -> None:
    assert keys.object_rank(name) is None
    with pytest.raises(FormatError, match="not the name of an object"):
        keys.check_object_name(name)


@pytest.mark.parametrize("name", [keys.ballot_name("0" * 32), keys.joint_plan_name("0" * 32)])
def test_objects_of_no_rank(name: str) -> None:
    assert keys.check_object_name(name) == name
    assert keys.object_rank(name) is None


@given(names)
@example("000003.vote")
@example("\u0660\u0660\u0660\u0660\u0663.vote")
@example("\u00b2\u00b2\u00b2\u00b2\u00b2-0.chunks")
@example("00003.vote\n")
def test_no_other_spelling_names_an_object(name: str) -> None:
    rank, voter = keys.object_rank(name), keys.vote_rank(name)
    if voter is not None:
        assert name == keys.vote_name(voter)
    if rank is not None:
        head = f"{rank:05d}"
        assert name.startswith((f"{head}-", f"{head}."))
        assert keys.check_object_name(name) == name


@pytest.mark.parametrize("name", ["", "1", "000000001", "0000000\u0661", "00000001.tmp", "00000001\n", "-0000001"])
def test_no_other_spelling_names_a_start(name: str) -> None:
    assert keys.start_of(name) is None


class Kind(str, enum.Enum):  # noqa: UP042  # a StrEnum shows its value, this one its name
    BEST = "best"


class Shouting(str):
    def __str__(self) -> str:
        return self.upper()

    def __format__(self, spec: str) -> str:
        return self.upper()


@pytest.mark.parametrize("tag", [Kind.BEST, Shouting("best"), np.str_("best")])
def test_a_tag_of_a_subclass_is_its_plain_text(tag: str) -> None:
    found = keys.check_tag(tag)
    assert type(found) is str
    assert f"{found}" == "best"
