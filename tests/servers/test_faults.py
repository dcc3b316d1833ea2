"""Which requests a rule hits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.servers.faults import CutBefore, Rule
from tests.servers.http_messages import RequestHead
from tests.servers.s3_operations import operation

PART = "PUT /bucket/a/key?partNumber=2&uploadId=x"


def request(line: str, **headers: str) -> RequestHead:
    lines = [f"{line} HTTP/1.1", "Host: here", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return RequestHead("\r\n".join([*lines, "", ""]).encode())


def rule(seed: int = 0, **which: Any) -> Rule:
    return Rule(CutBefore(), random.Random(seed), **which)


def hits(rule: Rule, count: int) -> list[int]:
    """Which of so many equal requests it hits."""
    return [number for number in range(1, count + 1) if rule.strikes(request(PART), taken=False)]


@pytest.mark.parametrize(
    ("which", "other"),
    [
        ({"operation": "UploadPart"}, {"operation": "PutObject"}),
        ({"method": "PUT"}, {"method": "GET"}),
        ({"path": "a/k.y$"}, {"path": "^/key"}),
        ({"query": "uploadId"}, {"query": "uploads"}),
        ({"header": "If-None-Match"}, {"header": "If-Match"}),
        ({"where": lambda head: head.query["partNumber"] == "2"}, {"where": lambda head: head.query["partNumber"] == "1"}),
        ({}, {"method": "PUT", "query": "uploads"}),
    ],
    ids=["operation", "method", "path", "query", "header", "where", "all"],
)
def test_a_rule_matches_what_it_names(which: dict[str, Any], other: dict[str, Any]) -> None:
    head = request(PART, If_None_Match="*")
    assert rule(**which).strikes(head, taken=False)
    assert not rule(**other).strikes(head, taken=False)


def test_a_rule_hits_once_unless_it_is_told_otherwise() -> None:
    assert hits(rule(), 4) == [1]
    assert hits(rule(nth=3), 4) == [3]
    assert hits(rule(nth=2, times=2), 4) == [2, 3]
    assert hits(rule(nth=2, times=None), 4) == [2, 3, 4]


def test_a_request_that_another_rule_hit_is_counted_but_uses_nothing_up() -> None:
    second, first = rule(nth=2), rule()
    for one in (second, first):
        assert not one.strikes(request(PART), taken=True)
        assert one.strikes(request(PART), taken=False)
        assert (one.matched, one.hits) == (2, 1)


def test_chance_is_the_seed_s() -> None:
    chosen = hits(rule(seed=1, times=None, probability=0.3), 1000)
    assert 250 < len(chosen) < 350
    assert chosen == hits(rule(seed=1, times=None, probability=0.3), 1000)
    assert chosen != hits(rule(seed=2, times=None, probability=0.3), 1000)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("GET /", "ListBuckets"),
        ("PUT /bucket", "CreateBucket"),
        ("HEAD /bucket/", "HeadBucket"),
        ("DELETE /bucket", "DeleteBucket"),
        ("GET /bucket?prefix=a", "ListObjects"),
        ("GET /bucket/?list-type=2&prefix=a%2Fb", "ListObjectsV2"),
        ("GET /bucket?uploads", "ListMultipartUploads"),
        ("POST /bucket?delete", "DeleteObjects"),
        ("PUT /bucket/a/key", "PutObject"),
        ("GET /bucket/key?x-id=GetObject", "GetObject"),
        ("HEAD /bucket/key", "HeadObject"),
        ("DELETE /bucket/key", "DeleteObject"),
        ("POST /bucket/key?uploads=", "CreateMultipartUpload"),
        (PART, "UploadPart"),
        ("GET /bucket/key?uploadId=x", "ListParts"),
        ("POST /bucket/key?uploadId=x", "CompleteMultipartUpload"),
        ("DELETE /bucket/key?uploadId=x", "AbortMultipartUpload"),
        ("PATCH /bucket/key", "Other"),
        ("POST /", "Other"),
    ],
)
def test_operations_have_their_names(line: str, name: str) -> None:
    assert operation(request(line)) == name


def test_copies_are_known_by_their_header() -> None:
    assert operation(request("PUT /bucket/key", x_amz_copy_source="/bucket/other")) == "CopyObject"
    assert operation(request(PART, x_amz_copy_source="/bucket/other")) == "UploadPartCopy"
