"""The status page in a real browser; without one, what can be said of its files."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from checkpointd.config import ServeConfig
from checkpointd.daemon.http import server
from checkpointd.daemon.http.server import serving
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.roots.root_monitor import RootMonitor
from checkpointd.daemon.status.model import DaemonStatus, SaveStatus, SpaceStatus
from checkpointd.layout.manifest import ErrorReport, Inline
from checkpointd.report.advice import AFRESH, after_abort
from checkpointd.store.posix.store import PosixStore
from tests.unit.daemon.conftest import serving as serving_clients
from tests.unit.daemon.conftest import shard_of
from tests.unit.daemon.example_statuses import (
    BUSY_ROOT,
    HOSTILE,
    NOW,
    busy,
    daemon_status,
    failing,
    fresh,
    hostile,
    many,
    overlapping,
    rank_status,
    root_status,
    save,
    spooling,
)

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text()
ASSETS = {entry.name: entry.read_text() for entry in (files("checkpointd.daemon.http") / "page").iterdir()}

# One browser is enough for two cores, and for all tests.
pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.asyncio(loop_scope="module")]


# --- without a browser ---------------------------------------------------------------------------------------


async def test_nothing_comes_from_outside() -> None:
    """No address of another host but the name of SVG's namespace, and no script or style that the policy would not allow."""
    for name, text in ASSETS.items():
        assert set(re.findall(r"\w+://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}, name
    page = ASSETS["index.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {"page/icon.svg", "page/style.css", "page/main.js", "api/status"}


async def test_no_text_is_ever_parsed_as_html() -> None:
    for name, text in ASSETS.items():
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function", text
            ), name


async def test_modules_import_only_what_is_there() -> None:
    for name, text in ASSETS.items():
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in ASSETS, f"{name} imports {imported}"


# --- in a browser --------------------------------------------------------------------------------------------


@dataclass
class Daemon:
    """What the page sees; `shown` may be changed while it looks."""

    url: str
    shown: DaemonStatus
    hub: Hub
    complaints: list[str] = field(default_factory=list)
    """What the browser's console said of errors: refused by the policy, exceptions, files that are not there."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    playwright = pytest.importorskip("playwright.async_api", reason="needs playwright: make setup installs it")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    async with playwright.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def browser(chromium: Browser) -> AsyncIterator[Browser]:
    """As a new one: what a test opened in it is closed, and forgotten."""
    yield chromium
    for context in chromium.contexts:
        await context.close()


@pytest_asyncio.fixture(loop_scope="module")
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    monkeypatch.setattr(server, "FRESH_S", -1.0)
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),)))
    made = Daemon("", busy(8), hub)
    async with serving(hub, "127.0.0.1:0", look=lambda _: made.shown) as url:
        made.url = url
        yield made


async def opened(browser: Browser, daemon: Daemon, **settings: Any) -> Page:
    context = await browser.new_context(**{"timezone_id": "UTC", **settings})
    context.set_default_timeout(120_000)
    page = await context.new_page()
    page.on("console", lambda message: daemon.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: daemon.complaints.append(str(error)))
    await page.goto(daemon.url)
    await page.wait_for_selector("main .card")
    return page


async def text_of(page: Page, selector: str) -> str:
    return " ".join((await page.locator(selector).first.inner_text()).split())


async def test_what_exists_and_what_is_in_flight(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    assert await page.title() == "checkpointd on node-17"
    assert "serving" in await text_of(page, "#head")
    latest = await text_of(page, "tr.latest")
    assert latest.startswith("global_step4100 latest in memory 4,100")
    assert await page.locator("section[aria-label=Checkpoints] tbody tr").count() == 8
    flight = await text_of(page, ".flight")
    assert "global_step4200" in flight
    assert re.search(r"6 persisting · 2 voted · [\d.]+ GiB of 16\.0 GiB · [\d.]+ GiB/s · about [\d.]+ s left", flight)
    assert "Waiting for the votes of ranks 1–3, 5–7." in flight
    assert re.search(r"rank 1 \d+ %, [\d.]+ MiB/s, [\d.]+ s left", flight)
    whole = await page.locator(".flight .bar progress").evaluate("e => e.value")
    assert 0.5 < whole < 0.7
    assert "Snapshots held 16.0 GiB of 64.0 GiB" in await text_of(page, "section[aria-label=Memory]")
    facts = await text_of(page, "section[aria-label='The daemon']")
    assert "Process 812" in facts
    assert "Bandwidth limit 1.4 GiB/s" in facts
    assert daemon.complaints == []


async def test_the_timeline_is_a_picture_with_words(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon, viewport={"width": 1280, "height": 900})
    svg = page.locator("svg.timeline")
    label = await svg.get_attribute("aria-label") or ""
    assert label.startswith("Timeline of the last saves of 8 ranks: global_step3800 took 7.2 s;")
    assert await svg.locator(".panel").count() == 5
    for kind in ("staging", "persisting", "voted"):
        assert await svg.locator(f"path.seg.{kind}").count() == 5
        assert await page.locator(f".legend .seg.{kind}").count() == 1
    assert await svg.locator(".committed").count() == 4
    assert await svg.locator("path.now").count() == 1
    box = await svg.bounding_box()
    assert box is not None
    assert 560 < box["width"] <= 1232
    await svg.scroll_into_view_if_needed()
    await svg.hover(position={"x": 60, "y": 50})
    assert re.fullmatch(
        r"rank 0 · global_step3800 · committed\nstaging [^→]+ → persisting [^→]+ → voted .+",
        await page.locator("#tip").inner_text(),
    )
    await page.get_by_text("The same as a table").click()
    await page.wait_for_selector("div[aria-label='Timeline as a table'] tbody tr")
    assert await page.locator("div[aria-label='Timeline as a table'] tbody tr").count() == 40
    assert daemon.complaints == []


async def test_it_follows_without_losing_what_the_reader_did(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    await page.get_by_text("The same as a table").click()
    await page.locator("[data-action=scale]").focus()
    daemon.shown = daemon_status(
        root_status(BUSY_ROOT, ranks=busy(8).roots[0].ranks, recent=busy(8).roots[0].recent, newest=4200), now=NOW + 5
    )
    await page.get_by_text("Nothing is in flight").wait_for()
    assert "global_step4200" in await text_of(page, "tr.latest")
    assert await page.locator("details[data-details^='table ']").get_attribute("open") is not None
    assert await page.evaluate("document.activeElement.dataset.action") == "scale"
    assert daemon.complaints == []


async def test_errors_in_words(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = failing()
    page = await opened(browser, daemon)
    failures = [" ".join(text.split()) for text in await page.locator(".failure").all_inner_texts()]
    assert len(failures) == 2
    assert re.search(r"rank 2 failed: write: no space left on device .* StoreFullError", failures[0])
    assert failures[0].index("rank 2 failed") < failures[0].index("ranks 0, 1, 3 aborted")
    assert failures[0].count("Free some space") == 1
    assert "ranks 0–2 aborted: global_step4000: no vote of rank 3 came" in failures[1]
    assert "The daemon was told to stop" in await text_of(page, "main .note")
    assert "No trainer is connected for rank 3." in await text_of(page, "main")
    assert await text_of(page, "details.root .reason") == "The root cannot be looked at: /mnt/scratch/run2: Stale file handle."
    assert await page.locator("svg.timeline path.seg.lost").count() == 2
    assert daemon.complaints == []


async def test_names_are_text_and_nothing_more(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = hostile()
    page = await opened(browser, daemon)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert await page.locator("main img, main script").count() == 0
    assert await page.title() == "checkpointd on node-17"
    for selector in ("h2.path", ".flight h4", ".failure h4", ".failure p", ".failure .advice"):
        assert shown in await text_of(page, selector), selector
    assert shown in (await page.locator("svg.timeline").get_attribute("aria-label") or "")
    assert "\u202e" not in await page.inner_text("body")
    await page.get_by_text("The same as a table").click()
    await page.wait_for_selector("div[aria-label='Timeline as a table'] tbody tr")
    assert await page.locator("main img").count() == 0
    assert daemon.complaints == []


async def test_two_hundred_and_fifty_six_ranks(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = busy(256)
    page = await opened(browser, daemon, viewport={"width": 1280, "height": 900})
    assert "192 persisting · 64 voted" in await text_of(page, ".flight")
    assert "furthest behind: rank" in await text_of(page, ".strip")
    assert await page.locator(".strip svg path").count() == 2
    assert await page.locator("*").count() < 600
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = await page.locator("svg.timeline").bounding_box()
    assert box is not None
    assert 512 <= box["height"] < 700
    await page.get_by_text("All 256 ranks").click()
    await page.wait_for_selector("div[aria-label=Ranks] tbody tr")
    assert await page.locator("div[aria-label=Ranks] tbody tr").count() == 256
    daemon.shown = msgspec.structs.replace(busy(256), leaving=True)
    await page.get_by_text("The daemon was told to stop").wait_for()
    assert await page.locator("div[aria-label=Ranks] tbody tr").count() == 256
    assert daemon.complaints == []


async def test_what_lies_in_the_spool_is_not_shown_as_done(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = spooling()
    page = await opened(browser, daemon)
    assert "in the spool, 4 % uploaded" in await text_of(page, "details.root summary")
    flights = [" ".join(text.split()) for text in await page.locator(".flight").all_inner_texts()]
    assert [("0 % uploaded" in text, "12 % uploaded" in text) for text in flights] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert "2 spooled · 0 B of 32.0 MiB uploaded" in flights[0]
    assert "rank 0 spooled, 16.0 MiB to upload" in flights[0]
    assert "2 uploading · 4.0 MiB of 32.0 MiB uploaded" in flights[2]
    assert "rank 1 uploading, 4.0 MiB of 16.0 MiB" in flights[2]
    assert await page.locator(".flight progress").evaluate_all("all => Math.max(...all.map((e) => e.value))") == 0.25
    daemon.shown = spooling(1, 16)
    await page.locator(".strip svg").wait_for()
    heights = await page.locator(".strip path").evaluate_all("all => all.map((e) => [e.classList[1], e.getBBox().height])")
    assert dict(heights)["spooled"] == 48
    assert daemon.complaints == []


async def test_of_hundreds_of_saves_that_wait_the_newest_few_are_shown_and_the_others_counted(
    browser: Browser, daemon: Daemon
) -> None:
    daemon.shown = spooling(256)
    page = await opened(browser, daemon)
    assert await page.locator(".flight h4 bdi").all_inner_texts() == ["step253", "step254", "step255", "step256"]
    await page.get_by_text("252 more saves in flight, the oldest for 4 h 16 min").click()
    rows = page.locator("div[aria-label='More saves in flight'] tbody tr")
    await rows.first.wait_for()
    assert await rows.count() == 252
    assert (
        " ".join((await rows.first.inner_text()).split())
        == "step252 00000003-0 25,200 5 min 00 s 2 spooled · 0 B of 32.0 MiB uploaded"
    )
    shown = daemon.shown.roots[0]
    first = [msgspec.structs.replace(one, phase="prepared") if one.tag == "step1" else one for one in shown.in_flight]
    daemon.shown = msgspec.structs.replace(daemon.shown, roots=(msgspec.structs.replace(shown, in_flight=tuple(first)),))
    await page.locator(".flight h4 bdi").filter(has_text=re.compile("^step1$")).wait_for()
    assert await page.locator(".flight").count() == 4
    assert daemon.complaints == []


async def test_the_daemon_goes_away_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),)))
    seen = Daemon("", busy(2), hub)
    async with serving(hub, "127.0.0.1:0", look=lambda _: seen.shown) as url:
        seen.url = url
        page = await opened(browser, seen)
        assert await text_of(page, "#alive") == ""
    await page.get_by_text("not answering", exact=True).wait_for()
    said = await text_of(page, "#alive")
    assert re.fullmatch(
        r"The daemon has not answered since 20[\dT:-]+Z\. Below is what it said at .*\. This page goes on asking\.", said
    )
    assert "global_step4100" in await text_of(page, "tr.latest")
    assert (await page.title()).startswith("⚠ ")
    assert await text_of(page, "details.root .verdict") == "! not known"
    assert "The daemon does not answer. It last said something of this root at 2026-" in await text_of(
        page, "details.root .reason"
    )
    assert "healthy" not in await page.inner_text("body")
    async with serving(hub, url.removeprefix("http://").rstrip("/"), look=lambda _: seen.shown):
        await page.get_by_text("serving", exact=True).wait_for()
        assert await text_of(page, "#alive") == ""


async def test_nobody_has_come_yet(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = daemon_status()
    page = await opened(browser, daemon)
    assert "No trainer has come yet" in await text_of(page, "main")
    assert daemon.complaints == []


async def test_what_is_left_out_is_said_above_the_roots(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    assert await page.locator(".note").count() == 0
    words = ("2 more are not looked after: /mnt/ckpts/<b>old</b>, /b.", "This is too long to be told whole.")
    daemon.shown = msgspec.structs.replace(many(), left_out=words)
    await page.wait_for_selector(".note")
    assert await page.locator(".note").all_inner_texts() == list(words)
    top = await page.evaluate("document.querySelectorAll('.note')[1].getBoundingClientRect().bottom")
    assert top <= await page.evaluate("document.querySelector('.root').getBoundingClientRect().top")
    assert daemon.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read_on_what_lies_behind_it(browser: Browser, daemon: Daemon, scheme: str) -> None:
    """WCAG's contrast: 4.5 for text; 3 for what the picture is made of."""
    daemon.shown = failing()
    page = await opened(browser, daemon, color_scheme=scheme)
    found = await page.evaluate(CONTRASTS)
    assert len(found["text"]) > 60
    assert {word: ratio for word, ratio in found["text"] if ratio < 4.5} == {}
    assert {name: ratio for name, ratio in found["picture"] if ratio < 3 and name != "waiting"} == {}


async def test_many_looks_at_once_are_answered(browser: Browser, daemon: Daemon) -> None:
    pages = await asyncio.gather(*(opened(browser, daemon) for _ in range(4)))
    for page in pages:
        assert "serving" in await text_of(page, "#head")


# --- what a reader needs ---------------------------------------------------------------------------------------

PHONE = {"width": 390, "height": 844}
OVERFLOWING = """() => [...document.querySelectorAll("main *, #head *")]
  .filter((e) => e.getClientRects().length && !e.closest("svg, thead") && e.getBoundingClientRect().right > innerWidth + 0.5)
  .map((e) => `${e.nodeName} ${e.className} ${e.textContent.slice(0, 30)}`)"""
COLLIDING = """() => [...document.querySelectorAll("svg.timeline g")].flatMap((panel) => {
  const boxes = [...panel.querySelectorAll("text.tick")].map((e) => [e.getBoundingClientRect(), e.textContent]);
  return boxes.slice(1).filter(([box], at) => box.left < boxes[at][0].right + 2).map(([, text]) => text);
})"""


async def roots_shown(page: Page) -> list[str]:
    return await page.locator("details.root h2").all_inner_texts()


async def opened_roots(page: Page) -> list[str]:
    return await page.locator("details.root[open] h2").all_inner_texts()


async def test_what_needs_a_look_comes_first_and_the_rest_is_folded(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = many()
    page = await opened(browser, daemon)
    shown = await roots_shown(page)
    words = [" ".join(text.split()) for text in await page.locator("details.root .verdict").all_inner_texts()]
    assert len(shown) == 20
    assert words[:4] == ["✕ failing", "✕ trainers gone", "! late", "✓ healthy"]
    assert words[-1] == "– idle"
    assert await page.locator("details.root").nth(3).locator(".badge.busy").inner_text() == "saving, 50 %"
    assert await opened_roots(page) == shown[:3]
    assert await page.locator("details.root:not([open]) .inside").count() == 0, "what is folded is not even made"
    assert await text_of(page, ".counts") == "20 roots: 1 failing, 1 trainers gone, 1 late, 7 healthy, 6 closed, 4 idle"
    assert "did not commit: rank 2 failed: write: no space left" in await text_of(page, "details.root .reason")
    assert daemon.complaints == []


async def test_a_root_is_folded_by_keyboard_and_stays_as_the_reader_left_it(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = many()
    page = await opened(browser, daemon)
    first, *_, last = await roots_shown(page)
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.querySelector('h2')?.innerText") == first
    await page.keyboard.press("Enter")
    await page.wait_for_function("() => document.querySelectorAll('details.root[open]').length === 2")
    await page.locator("details.root summary").last.focus()
    await page.keyboard.press("Space")
    await page.wait_for_selector("details.root:last-child .inside")
    daemon.shown = msgspec.structs.replace(many(), leaving=True)
    await page.get_by_text("The daemon was told to stop").wait_for()
    assert first not in await opened_roots(page)
    assert last in await opened_roots(page)
    assert await page.evaluate("document.activeElement.querySelector('h2')?.innerText") == last
    assert daemon.complaints == []


async def test_a_root_that_moves_up_keeps_the_readers_place(browser: Browser, daemon: Daemon) -> None:
    good, other = (msgspec.structs.replace(busy(2).roots[0], root=name, in_flight=()) for name in ("/a", "/b"))
    daemon.shown = daemon_status(good, other)
    page = await opened(browser, daemon)
    await page.locator("details[data-root='/b'] > summary").focus()
    await page.locator("details[data-root='/b']").get_by_text("The same as a table").click()
    await page.locator("details[data-root='/b'] > summary").focus()
    daemon.shown = daemon_status(good, msgspec.structs.replace(failing().roots[-1], root="/b"))
    await page.wait_for_selector("details.root:first-child .verdict.bad")
    assert await roots_shown(page) == ["/b", "/a"]
    assert await page.evaluate("document.activeElement.parentElement.dataset.root") == "/b"
    assert await page.locator("details[data-root='/b'] details[data-details^='table ']").get_attribute("open") is not None


async def test_each_verdict_is_a_word_a_sign_and_a_reason(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = failing()
    page = await opened(browser, daemon)
    assert await text_of(page, "details.root.is-bad .verdict") == "✕ unreadable"
    for root in daemon.shown.roots:
        card = page.locator("details.root").filter(has_text=root.verdict.reason)
        assert await card.locator(".verdict").inner_text() == f"✕ {root.verdict.state}"


@pytest.mark.parametrize("ranks", [1, 8, 256])
async def test_nothing_is_cut_off_on_a_phone(browser: Browser, daemon: Daemon, ranks: int) -> None:
    daemon.shown = busy(ranks)
    page = await opened(browser, daemon, viewport=PHONE)
    for summary in await page.locator("details[data-details] > summary").all():
        await summary.click()
    await page.wait_for_selector("div[aria-label=Ranks] tbody tr")
    assert await page.evaluate(OVERFLOWING) == []
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = "[...document.querySelectorAll('.scroll, .picture, .strip')].filter(e => e.scrollWidth > e.clientWidth)"
    assert await page.evaluate(f"{wide}.map(e => e.className)") == []
    assert daemon.complaints == []


@pytest.mark.parametrize("width", [390, 800, 1400])
async def test_labels_of_the_time_do_not_collide(browser: Browser, daemon: Daemon, width: int) -> None:
    lengths = (0.004, 0.09, 0.7, 7, 11, 59, 61, 640, 3000, 9000, 90_000)

    def slow(seconds: float) -> list[SaveStatus]:
        began = [NOW - 2.2 * seconds * (3 - k) for k in range(3)]
        return [save(0, 100 * k, began=at, persisting=seconds * 0.9, staging=0.0) for k, at in enumerate(began)]

    daemon.shown = daemon_status(*(root_status(f"/{n}", ranks=[rank_status(0, 1)], recent=slow(n)) for n in lengths))
    page = await opened(browser, daemon, viewport={"width": width, "height": 900})
    await page.evaluate("document.querySelectorAll('details.root').forEach((card) => { card.open = true; })")
    await page.wait_for_function(f"() => document.querySelectorAll('svg.timeline').length === {len(lengths)}")
    for scaled in (True, False):
        await page.locator("[data-action=scale]").first.set_checked(scaled)
        assert await page.locator("svg.timeline text.tick").count() >= 3 * len(lengths)
        assert await page.evaluate(COLLIDING) == []


async def test_saves_that_overlap_have_a_picture_and_a_scale_each(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = overlapping()
    page = await opened(browser, daemon, viewport={"width": 1280, "height": 900})
    assert await page.locator("svg.timeline .panel").count() == 5
    assert await page.locator("svg.timeline .overlap").count() == 4
    assert "beside the save before" in await text_of(page, ".legend")
    starts = await page.locator("svg.timeline g").evaluate_all(
        """panels => panels.map((g) => +g.querySelector('.seg.staging').getAttribute('d').match(/^M([\\d.]+)/)[1]
          - +g.querySelector('.panel').getAttribute('x'))"""
    )
    assert max(starts) < 1.0, "each begins at its own zero"
    await page.locator("[data-action=scale]").uncheck()
    ends = await page.locator("svg.timeline g").evaluate_all(
        """panels => panels.map((g) => {
          const box = g.querySelector('.panel').getBoundingClientRect();
          const right = Math.max(...[...g.querySelectorAll('.seg')].map((e) => e.getBoundingClientRect().right));
          return Math.abs(box.right - right);
        })"""
    )
    assert max(ends) < 2.0, "each fills its own picture"
    assert daemon.complaints == []


async def test_what_is_unknown_is_a_dash_that_says_why(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = fresh()
    page = await opened(browser, daemon)
    tiles = [" ".join(text.split()) for text in await page.locator(".tile").all_inner_texts()]
    assert tiles == [
        "Latest none",
        "Newest commit — no commit was seen",
        "Next save — fewer than three saves were seen",
        "Save to commit — no save has ended here yet",
        "Training held — no save has ended here yet",
        "Space left — the file system was not asked yet",
        "Ranks here 1 of 1 connected; 1 rank in the job",
    ]
    for dash in await page.locator(".unknown").all():
        assert (await dash.get_attribute("aria-label") or "").startswith("not known: ")
    assert await text_of(page, "div[aria-label=Ranks] tbody tr") == "0 4000 — 0 0 — — —"
    assert daemon.complaints == []


async def test_the_next_save_and_the_space_left(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    tiles = " | ".join([" ".join(text.split()) for text in await page.locator(".tile").all_inner_texts()])
    assert "Next save in 9.9 min one came every 10 min" in tiles
    assert "Space left 13 days 812.0 GiB free of 3.9 TiB; 62.0 GiB more a day" in tiles
    gib = 1 << 30
    tight = SpaceStatus(free_bytes=20 * gib, total_bytes=100 * gib, growth_bytes_per_day=30.0 * gib, days_left=2 / 3)
    calm = SpaceStatus(free_bytes=20 * gib, total_bytes=100 * gib, growth_bytes_per_day=-1.0 * gib, days_left=None)
    for space, selector, words in (
        (tight, ".tile.is-bad", "Space left 16 h 20.0 GiB free of 100.0 GiB; 30.0 GiB more a day"),
        (calm, ".tile:has-text('does not fill up')", "Space left 20.0 GiB of 100.0 GiB; it does not fill up"),
    ):
        daemon.shown = daemon_status(msgspec.structs.replace(busy(8).roots[0], space=space))
        await page.locator(selector).wait_for()
        assert await text_of(page, selector) == words
    late = next(root for root in many().roots if root.verdict.state == "late")
    daemon.shown = daemon_status(late)
    await page.locator(".tile.is-doubt").wait_for()
    assert await text_of(page, ".tile.is-doubt") == "Next save 43 min late one came every 10 min"


async def test_the_history_is_drawn_and_told(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    part = page.locator("section[aria-label=History]")
    said = " ".join((await part.inner_text()).split())
    assert "The last 48 saves, from 2026-09-21T06:21:47Z to 2026-09-21T14:11:47Z, oldest left; 2 did not commit" in said
    for label in ("Save to commit", "Throughput", "Training held", "Size on disk", "Metric loss"):
        assert await part.locator("figure", has_text=label).locator("path.line").count() == 1
        assert await part.locator("figure", has_text=label).locator("path.miss").count() == 1
    chart = part.locator("svg.spark").first
    assert re.fullmatch(r"Save to commit of the last 46 saves: median .* s, longest 1\d s, now .* s", await label_of(chart))
    await chart.scroll_into_view_if_needed()
    box = await chart.bounding_box()
    assert box is not None
    await chart.hover(position={"x": box["width"] - 1, "y": 20})
    assert (await page.locator("#tip").inner_text()).startswith("global_step4100 · 2026-09-21T14:11:47Z\nSave to commit: ")
    await part.get_by_text("The history as a table").click()
    rows = page.locator("div[aria-label='History as a table'] tbody tr")
    await rows.first.wait_for()
    assert await rows.count() == 48
    lost = " ".join((await rows.filter(has_text="not committed").first.inner_text()).split())
    assert re.fullmatch(r"global_step\d+ [\d,]+ 2026-09-\d\dT[\d:]+Z not committed — — — — —", lost)
    assert daemon.complaints == []


async def label_of(found: Locator) -> str:
    return await found.get_attribute("aria-label") or ""


async def test_what_is_not_known_is_not_drawn_as_zero_and_says_why(browser: Browser, daemon: Daemon) -> None:
    old = tuple(msgspec.structs.replace(one, took_s=None, held_s=None, raw_bytes=None) for one in busy(1).roots[0].history)
    daemon.shown = daemon_status(msgspec.structs.replace(busy(1).roots[0], history=old))
    page = await opened(browser, daemon)
    took = page.locator("figure", has_text="Save to commit")
    assert (
        " ".join((await took.inner_text()).split())
        == "Save to commit — a later start committed it, and does not know when save() was called"
    )
    assert await took.locator("svg").count() == 0


async def test_the_history_is_there_after_a_restart_of_the_daemon(
    browser: Browser, store: PosixStore, root: Path, tmp_path: Path
) -> None:
    async with serving_clients(root.parent) as first:
        client = await first.client()
        await client.ready(root, shard_of(0))
        for n in (1, 2, 3):
            await client.whole_save(n, shard_of(0))
            await client.outcome(n)
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(root.parent),)))
    await RootMonitor(hub).look(str(root))
    async with serving(hub, "127.0.0.1:0") as url:
        page = await opened(browser, Daemon(url, daemon_status(), hub))
        assert await text_of(page, "details.root .verdict") == "– idle"
        await page.locator("details.root > summary").click()
        part = page.locator("section[aria-label=History]")
        await part.wait_for()
        assert (await part.inner_text()).split("\n")[2].startswith("The last 3 saves, from ")
        assert await part.locator("figure", has_text="Save to commit").locator("path.line").count() == 1


# --- numbers and words -------------------------------------------------------------------------------------------


async def test_the_median_of_two_is_between_them(browser: Browser, daemon: Daemon) -> None:
    root = busy(2).roots[0]
    two = tuple(msgspec.structs.replace(one, took_s=took_s) for one, took_s in zip(root.history[-2:], (2.0, 4.0), strict=True))
    daemon.shown = daemon_status(msgspec.structs.replace(root, history=two, commit_s=(2.0, 4.0)))
    page = await opened(browser, daemon)
    assert "median 3.0 s, longest 4.0 s" in await page.locator("figure", has_text="Save to commit").inner_text()
    tile = page.locator(".tile", has_text="Save to commit")
    assert " ".join((await tile.inner_text()).split()) == "Save to commit 3.0 s median of the last 2"


@pytest.mark.parametrize(
    ("spare", "every", "said"), [(0.4, 0.3, "due now one came every 300 ms"), (2.0, 4.0, "in 2.0 s one came every 4.0 s")]
)
async def test_short_times_are_not_called_no_time(
    browser: Browser, daemon: Daemon, spare: float, every: float, said: str
) -> None:
    root = msgspec.structs.replace(busy(1).roots[0], next_due_at=NOW + spare, every_s=every)
    daemon.shown = daemon_status(root)
    daemon.shown = msgspec.structs.replace(
        daemon.shown, roots=(msgspec.structs.replace(daemon.shown.roots[0], next_due_at=NOW + spare, every_s=every),)
    )
    page = await opened(browser, daemon)
    assert " ".join((await page.locator(".tile", has_text="Next save").inner_text()).split()) == f"Next save {said}"


async def test_a_rank_that_never_called_save_is_named_and_counts_as_not_done(browser: Browser, daemon: Daemon) -> None:
    ranks = [rank_status(rank, 2) for rank in range(2)]
    daemon.shown = daemon_status(root_status("/r", ranks=ranks, in_flight=[save(1, 900, began=NOW - 9, phase="prepared")]))
    page = await opened(browser, daemon)
    assert await text_of(page, ".badge.busy") == "saving, 50 %"
    flight = await text_of(page, ".flight")
    assert "50 %" in flight
    assert "100 %" not in flight
    assert "rank 0 has not called save() yet." in flight
    assert "Votes are counted once rank 0 has called save()." in flight, "this is its node"


async def test_all_ranks_here_have_voted_and_others_have_not(browser: Browser, daemon: Daemon) -> None:
    ranks = [rank_status(rank, 4) for rank in range(2)]
    flying = [save(0, 900, began=NOW - 9, phase="prepared", missing=(2, 3)), save(1, 900, began=NOW - 9, phase="prepared")]
    daemon.shown = daemon_status(root_status("/r", ranks=ranks, in_flight=flying))
    page = await opened(browser, daemon)
    assert await text_of(page, ".badge.busy") == "saved here, waiting for votes"
    assert "99 % 2 voted · 4.0 GiB of 4.0 GiB Waiting for the votes of ranks 2, 3." in await text_of(page, ".flight")


async def test_a_save_whose_parts_are_not_known_is_not_drawn_as_staging(browser: Browser, daemon: Daemon) -> None:
    inline = Inline(reason="lost", why="the sidecar has closed the connection")
    unmeasured = msgspec.structs.replace(
        save(0, 900, began=NOW - 9), staged_at=None, persisting_at=None, voted_at=None, inline=inline
    )
    daemon.shown = daemon_status(root_status("/r", ranks=[rank_status(0, 1)], recent=[unmeasured]))
    page = await opened(browser, daemon)
    assert await page.locator("svg.timeline path.seg.unmeasured").count() == 1
    assert await page.locator("svg.timeline path.seg.staging").count() == 0
    assert "not measured in parts" in await text_of(page, ".legend")
    await page.get_by_text("The same as a table").click()
    table = page.locator("div[aria-label='Timeline as a table']")
    await table.locator("tbody tr").wait_for()
    titles = await table.locator("thead th").count()
    assert titles == await table.locator("tbody tr").first.locator("td").count(), "each number stands below its title"


async def test_more_than_the_whole_is_never_done(browser: Browser, daemon: Daemon) -> None:
    one = save(0, 900, began=NOW - 9, phase="persisting", total=771 << 10)
    flying = [msgspec.structs.replace(one, raw_done=772 << 10)]
    daemon.shown = daemon_status(root_status("/r", ranks=[rank_status(0, 1)], in_flight=flying))
    page = await opened(browser, daemon)
    assert "771.0 KiB of 771.0 KiB" in await text_of(page, ".flight")


async def test_which_roots_are_served_stands_there(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    assert "Serves /mnt/ckpts, /mnt/scratch" in " ".join(
        (await page.locator("section[aria-label='The daemon']").inner_text()).split()
    )


async def test_all_times_are_of_one_zone_and_say_so(browser: Browser, daemon: Daemon) -> None:
    """Wherever the reader is."""
    daemon.shown = failing()
    page = await opened(browser, daemon, timezone_id="Asia/Kathmandu")
    text = await page.inner_text("body")
    times = re.findall(r"\d\d:\d\d:\d\d.?", text)
    assert len(times) > 5
    assert {time[-1] for time in times} == {"Z"}
    assert "as of 2026-09-21T14:13:20Z" in text


async def test_long_names_and_long_lists_are_whole_on_a_phone(browser: Browser, daemon: Daemon) -> None:
    tag = "checkpoint-of-the-long-run-with-its-own-name-0042"
    recent = [save(0, 100 * k, began=NOW - 900 + 100 * k, tag=f"{tag}-{k}") for k in range(4)]
    root = msgspec.structs.replace(busy(1).roots[0], recent=tuple(recent), in_flight=(), latest=tag)
    daemon.shown = daemon_status(root)
    page = await opened(browser, daemon, viewport=PHONE)
    tags = "[...document.querySelectorAll('svg.timeline svg')].map((e) => [...e.querySelectorAll('.panel-tag')])"
    drawn = await page.evaluate(f"{tags}.map((lines) => lines.map((line) => line.textContent).join(''))")
    assert drawn == [f"{tag}-2", f"{tag}-3"]
    clipped = """[...document.querySelectorAll('svg.timeline svg')].flatMap((e) => {
      const box = e.getBoundingClientRect();
      const parts = [...e.querySelectorAll('text')].map((text) => text.getBoundingClientRect());
      return parts.filter((part) => part.right > box.right + 0.5 || part.bottom > box.bottom + 0.5);
    })"""
    assert await page.evaluate(f"{clipped}.length") == 0
    hidden = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollHeight > e.clientHeight + 1)"
    assert await page.evaluate(f"{hidden}.length") == 0
    assert tag in await text_of(page, "details.root summary .brief")
    assert await page.locator("details.root summary .brief .tag").is_visible()


async def test_where_the_time_went(browser: Browser, daemon: Daemon) -> None:
    page = await opened(browser, daemon)
    part = page.locator("section[aria-label='Where the time went']")
    said = " ".join((await part.inner_text()).split())
    assert said.startswith("Where the time of global_step4100 went")
    for label in ("Staging", "Persisting", "hashing", "encoding", "writing", "Waiting for votes"):
        assert re.search(rf"{label} [\d.]+ m?s, rank \d; median [\d.]+ m?s", said), label


async def test_a_name_for_the_root_and_what_trainers_persisted_themselves(browser: Browser, daemon: Daemon) -> None:
    [root] = busy(2).roots
    ranks = [msgspec.structs.replace(rank, saves_inline=2) for rank in root.ranks]
    last = msgspec.structs.replace(
        root.recent[-1], inline=Inline(reason="refused", why="the sidecar refused: no room for the snapshot")
    )
    shown = msgspec.structs.replace(root, name="llama", ranks=tuple(ranks), recent=(*root.recent[:-1], last))
    daemon.shown = msgspec.structs.replace(daemon_status(shown), refusals={"full": 2, "request": 0})
    page = await opened(browser, daemon)
    assert await text_of(page, "h2.path") == f"llama {BUSY_ROOT}"
    said = await text_of(page, "section[aria-label=Ranks]")
    assert "The trainers persisted 4 saves themselves; the last one: the sidecar refused: no room for the snapshot." in said
    assert "Refused 2 (2 full)" in await text_of(page, "section[aria-label='The daemon']")
    assert "persisted it themselves, since the sidecar refused it" in await text_of(page, ".reason")
    assert daemon.complaints == []


async def test_each_error_has_its_own_advice(browser: Browser, daemon: Daemon) -> None:
    full = ErrorReport(code="StoreFullError", message="no space left", phase="persisting")
    torn = ErrorReport(code="StagingError", message="it was torn", phase="staging")
    recent = [
        save(rank, 100, began=NOW - 60, phase="failed", error=error, advice=after_abort(error, (rank,)))
        for rank, error in ((0, full), (1, torn))
    ]
    daemon.shown = daemon_status(root_status("/a", ranks=[rank_status(r, 2) for r in range(2)], recent=recent))
    page = await opened(browser, daemon)
    lines = [" ".join(text.split()) for text in await page.locator(".failure p").all_inner_texts()]
    assert lines == [
        "rank 0 failed: no space left StoreFullError",
        "Free some space, or raise the quota, where rank 0 writes. " + AFRESH,
        "rank 1 failed: it was torn StagingError",
        "See the log of rank 1 for the snapshot that failed. " + AFRESH,
    ]
    daemon.shown = failing()
    await page.wait_for_selector("[role=alert]")
    assert "Check the file system of the root on the machine of the daemon" in await text_of(page, "[role=alert] .advice")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_kind_is_told_by_its_hue_alone(browser: Browser, daemon: Daemon, scheme: str) -> None:
    """Neighbours in the picture differ in texture, or in lightness as somebody with protanopia sees it."""
    page = await opened(browser, daemon, color_scheme=scheme)
    fills = {
        kind: await page.locator(f".legend .seg.{kind}").evaluate("e => getComputedStyle(e).fill")
        for kind in ("staging", "waiting", "persisting", "voted")
    }
    assert "stripes" in fills["voted"]
    assert await page.locator("pattern#hatch, pattern#stripes").count() == 2
    assert protan_distance(fills["staging"], fills["persisting"]) > 0.25
    assert await page.locator(".verdict .sign").first.inner_text() == "✓"


def protan_distance(one: str, other: str) -> float:
    """How far two colours lie apart for an eye without long cones: the simulation of Viénot, Brettel and Mollon (1999)."""

    def seen(text: str) -> list[float]:
        red, green, blue = ((int(part) / 255) ** 2.2 for part in re.findall(r"\d+", text)[:3])
        yellow = 0.11238 * red + 0.88762 * green
        return [yellow, yellow, max(0.0, 0.00401 * red - 0.00401 * green + blue)]

    return sum((a - b) ** 2 for a, b in zip(seen(one), seen(other), strict=True)) ** 0.5
