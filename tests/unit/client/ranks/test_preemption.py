"""Preemption: ranks as threads with one board between them, whose every call a test can put in any order; and real signals."""

from __future__ import annotations

import ctypes
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import UsageError
from checkpointd_client import Checkpointer
from checkpointd_client.ranks import preemption
from checkpointd_client.ranks.board import SoloBoard
from checkpointd_client.ranks.preemption import Preemption, graces_of
from checkpointd_client.ranks.signals import Arrivals

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
LIMIT_S = 60.0


class Order:
    """Lets one of several threads go on at a time, from one call of the board to the next, in an order that a seed gives."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._running = 0
        self._chosen: int | None = None

    def enter(self) -> None:
        with self._changed:
            self._running += 1

    def leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._choose()

    def turn(self, me: int) -> None:
        """Wait for this thread's turn."""
        with self._changed:
            self._waiting.add(me)
            self._choose()
            assert self._changed.wait_for(lambda: self._chosen == me, LIMIT_S)
            self._chosen = None
            self._waiting.discard(me)

    def _choose(self) -> None:
        if self._chosen is None and self._waiting and len(self._waiting) == self._running:
            self._chosen = self._random.choice(sorted(self._waiting))
            self._changed.notify_all()


class SharedBoard(SoloBoard):
    """One rank's view of notes that all share."""

    is_solo = False

    def __init__(self, notes: dict[str, str], me: int, order: Order | None = None) -> None:
        self._notes, self._me, self._order = notes, me, order

    def _turn(self) -> None:
        if self._order is not None:
            self._order.turn(self._me)

    def post(self, key: str, text: str) -> None:
        self._turn()
        self._notes[f"{key}/{self._me}"] = text

    def posted(self, key: str) -> dict[int, str]:
        self._turn()
        return {int(name.rpartition("/")[2]): text for name, text in self._notes.items() if name.startswith(f"{key}/")}

    def agree(self, key: str, proposal: str) -> str:
        self._turn()
        return super().agree(key, proposal)

    def peek(self, key: str) -> str | None:
        self._turn()
        return super().peek(key)


def ranks_of(world: int, graces: dict[signal.Signals, float], order: Order | None = None) -> list[Preemption]:
    notes: dict[str, str] = {}
    return [Preemption(graces, SharedBoard(notes, rank, order)) for rank in range(world)]


def comes(rank: Preemption, number: signal.Signals, ago_s: float = 0.0) -> None:
    """The signal comes to that rank; nobody else is told yet."""
    rank._note(number, time.monotonic() - ago_s)


# --- one answer for all ----------------------------------------------------------------------------------------------

Loop = list[tuple[int, int]]
"""How often each step is asked about: a training loop, with evaluations and a warm-up in it."""


@given(
    loop=st.lists(st.integers(1, 4), min_size=6, max_size=12).map(lambda counts: list(enumerate(counts))),
    moments=st.lists(st.integers(0, 8) | st.none(), min_size=2, max_size=3).filter(any),
    seed=st.integers(0, 10_000),
)
def test_preempt_1_ranks_that_ask_alike_stop_at_the_same_question_whatever_the_order(
    loop: Loop, moments: list[int | None], seed: int
) -> None:
    """`moments`: after so many questions the signal comes to that rank, if it does."""
    order = Order(seed)
    ranks = ranks_of(len(moments), {TERM: 1000.0}, order)

    def run(me: int) -> tuple[int, int] | None:
        try:
            asked = 0
            for step, count in loop:
                for number in range(count):
                    if asked == moments[me]:
                        comes(ranks[me], TERM)
                    if ranks[me].ask(step):
                        return step, number
                    asked += 1
            return None
        finally:
            order.leave()

    with ThreadPoolExecutor(len(moments)) as pool:
        for _ in ranks:
            order.enter()
        stops = [found.result(LIMIT_S) for found in [pool.submit(run, me) for me in range(len(moments))]]
    assert len(set(stops)) == 1, stops


@pytest.mark.parametrize("ahead", [0, 1, 4, 9])
def test_preempt_2_the_rank_that_is_furthest_stops_at_its_next_question(ahead: int) -> None:
    behind, in_front = ranks_of(2, {TERM: 1000.0})
    for step in range(ahead):
        assert not in_front.ask(step)
    comes(behind, TERM)
    assert [behind.ask(step) for step in range(ahead + 1)] == [*[False] * ahead, True]
    assert in_front.ask(ahead)


def test_an_evaluation_of_one_rank_alone_moves_nobodys_end() -> None:
    first, second = ranks_of(2, {TERM: 1000.0})
    for step in range(3):
        assert not first.ask(step)
        assert not second.ask(step)
        for _ in range(50):  # an evaluation on rank 0 alone, which looks whether to leave
            assert not first.begun
    comes(second, TERM)
    assert not first.begun  # nobody was told yet
    second._tell_at_once(TERM)
    assert first.begun
    assert [first.ask(3), second.ask(3)] == [True, True]


@pytest.mark.parametrize("evaluating", [0, 1])
def test_who_asked_more_often_in_an_evaluation_of_its_own_stops_at_the_same_step_as_the_others(evaluating: int) -> None:
    ranks = ranks_of(2, {TERM: 1000.0})
    for rank in ranks:
        assert not rank.ask(7)
    for _ in range(50):
        assert not ranks[evaluating].ask(7)
    comes(ranks[evaluating], TERM)
    assert ranks[evaluating].ask(7)  # it leaves the evaluation
    assert [rank.ask(8) for rank in ranks] == [True, True]


def test_preempt_3_half_way_through_the_grace_period_whoever_is_at_that_step_says_yes() -> None:
    """Each rank evaluates its own part, at its own speed: the slow one must not ask as often as the fast one first."""
    fast, slow = ranks_of(2, {TERM: 100.0})
    for _ in range(300):
        assert not fast.ask(7)
    assert not slow.ask(7)
    comes(slow, TERM, ago_s=20.0)
    assert not slow.ask(7)
    assert fast.ask(7)
    comes(slow, USR1)  # one that means nothing here
    slow._came[TERM] -= 30.0
    assert slow.ask(7)


def test_after_a_load_of_an_older_step_the_end_is_not_where_the_job_was_before() -> None:
    ranks = ranks_of(2, {TERM: 1000.0})
    for rank in ranks:
        assert not rank.ask(1000)
        rank.loaded()
    comes(ranks[0], TERM)
    assert [rank.ask(5) for rank in ranks] == [True, True]


def test_a_fixer_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "FIXER_S", 0.0)
    gone, left = ranks_of(2, {TERM: 1000.0})
    assert not left.ask(1)
    comes(gone, TERM)
    assert gone._hears()
    gone._board.agree("preempted/fixer", "gone")
    assert left.ask(2)


def test_of_several_signals_the_earliest_end_counts() -> None:
    (rank,) = ranks_of(1, {TERM: 25.0, USR1: 120.0})
    assert rank.grace_left_s() is None
    comes(rank, USR1)
    assert 100 < (rank.grace_left_s() or 0) <= 120
    comes(rank, TERM, ago_s=20.0)
    assert 0 <= (rank.grace_left_s() or 0) <= 5
    comes(rank, TERM)  # once more: it gives no more time
    assert (rank.grace_left_s() or 0) <= 5


def test_a_rank_that_no_signal_came_to_has_the_grace_period_from_when_it_hears_of_it() -> None:
    first, second = ranks_of(2, {TERM: 25.0, USR1: 120.0})
    comes(first, USR1)
    assert first.ask(1)
    assert second.ask(1)
    assert 100 < (second.grace_left_s() or 0) <= 120
    comes(first, TERM)
    assert first.begun
    assert second.begun
    assert 0 < (second.grace_left_s() or 0) <= 25


# --- the argument ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        (TERM, {TERM: 9.0}),
        (int(TERM), {TERM: 9.0}),
        ((TERM, USR1), {TERM: 9.0, USR1: 9.0}),
        ({TERM: 25, USR1: 120.0}, {TERM: 25.0, USR1: 120.0}),
    ],
)
def test_signals_are_one_several_or_each_with_its_seconds(given: Any, expected: dict[signal.Signals, float]) -> None:
    assert graces_of(given, 9.0) == expected


@pytest.mark.parametrize(
    "given", [9999, {TERM: 0}, {TERM: -1.0}, {TERM: math.inf}, {TERM: "soon"}, ["SIGTERM"], [[TERM]], signal.SIGKILL]
)
def test_what_cannot_be_a_signal_or_a_grace_period_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"preempt_signals|grace period"):
        Checkpointer(tmp_path, preempt_signals=given)


# --- real signals ----------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers_put_back() -> Iterator[None]:
    """No handler of a test is left behind."""
    before = {number: signal.getsignal(number) for number in (USR1, USR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def listening(*numbers: signal.Signals) -> tuple[Arrivals, dict[signal.Signals, float], threading.Event]:
    came: dict[signal.Signals, float] = {}
    told = threading.Event()
    return Arrivals(numbers, came.setdefault, lambda _: told.set()), came, told


@pytest.mark.usefixtures("handlers_put_back")
def test_a_signal_is_noted_while_the_main_thread_is_in_c_code_that_does_not_come_back() -> None:
    """As in a barrier: Python runs no handler before it is over. The mutex is one that no signal interrupts."""
    arrivals, came, told = listening(USR1, USR2)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    noted: Future[bool] = Future()

    def signal_and_let_go() -> None:
        os.kill(os.getpid(), USR2)
        told.wait(LIMIT_S)
        noted.set_result(USR2 in came)
        libc.pthread_mutex_unlock(mutex)

    threading.Thread(target=signal_and_let_go).start()
    libc.pthread_mutex_lock(mutex)
    assert noted.result(LIMIT_S)
    arrivals.close()


@pytest.mark.usefixtures("handlers_put_back")
def test_the_handler_that_was_there_is_called_as_well_and_put_back() -> None:
    heard: list[int] = []

    def before(number: int, frame: object) -> None:
        heard.append(number)

    signal.signal(USR1, before)
    arrivals, came, told = listening(USR1, USR2)
    os.kill(os.getpid(), USR1)
    assert USR1 in came
    assert told.wait(LIMIT_S)
    arrivals.close()
    assert heard == [USR1]
    assert (signal.getsignal(USR1), signal.getsignal(USR2)) == (before, signal.SIG_DFL)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.usefixtures("handlers_put_back")
def test_where_another_library_has_the_wakeup_descriptor_it_keeps_it() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(writing)
    try:
        arrivals, came, told = listening(USR1)
        os.kill(os.getpid(), USR1)
        assert USR1 in came
        assert told.wait(LIMIT_S)
        assert os.read(reading, 16) == bytes([USR1])
        arrivals.close()
    finally:
        assert signal.set_wakeup_fd(-1) == writing
        os.close(reading)
        os.close(writing)


def test_signals_are_for_the_main_thread_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="main thread"):
        pool.submit(Checkpointer, tmp_path, preempt_signals=USR1).result()


@pytest.mark.usefixtures("handlers_put_back")
def test_a_signal_that_comes_while_it_closes_does_not_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = Checkpointer(tmp_path, preempt_signals={USR1: 20.0})
    ckpt.save(1, {"w": torch.ones(8)}).wait()
    close: Callable[[], Any] = ckpt._core._store.close
    handlers = []

    async def signalled() -> None:
        handlers.append(signal.getsignal(USR1))
        os.kill(os.getpid(), USR1)
        await close()

    monkeypatch.setattr(ckpt._core._store, "close", signalled)
    signal.signal(USR2, signal.SIG_DFL)
    ckpt.close()
    assert handlers != [signal.SIG_DFL]
    assert signal.getsignal(USR1) == signal.SIG_DFL
