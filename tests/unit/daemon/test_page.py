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

from checkpointd.config import ServeConfig
from checkpointd.daemon import http
from checkpointd.daemon.http import serving
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.status import DaemonStatus
from tests.unit.daemon.standings import BUSY_ROOT, HOSTILE, NOW, busy, daemon_status, failing, hostile, root_status

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text()
ASSETS = {entry.name: entry.read_text() for entry in (files("checkpointd.daemon") / "page").iterdir()}

# One browser is enough for two cores.
pytestmark = pytest.mark.xdist_group("browser")


# --- without a browser ---------------------------------------------------------------------------------------


def test_nothing_comes_from_outside() -> None:
    """No address of another host but the name of SVG's namespace, and no script or style that the policy would not allow."""
    for name, text in ASSETS.items():
        assert set(re.findall(r"\w+://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}, name
    page = ASSETS["index.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {"page/icon.svg", "page/style.css", "page/main.js", "api/status"}


def test_no_text_is_ever_parsed_as_html() -> None:
    for name, text in ASSETS.items():
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function", text
            ), name


def test_modules_import_only_what_is_there() -> None:
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


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")
    async with playwright.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemon]:
    monkeypatch.setattr(http, "FRESH_S", -1.0)
    hub = Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),)))
    made = Daemon("", busy(8), hub)
    async with serving(hub, "127.0.0.1:0", look=lambda _: made.shown) as url:
        made.url = url
        yield made


async def opened(browser: Browser, daemon: Daemon, **settings: Any) -> Page:
    context = await browser.new_context(timezone_id="UTC", **settings)
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
    assert await text_of(page, "[role=alert]") == "This root cannot be looked at: /mnt/scratch/run2: Stale file handle"
    assert await page.locator("svg.timeline path.seg.lost").count() == 2
    assert await page.locator("nav a").count() == 2
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


async def test_saves_of_a_rank_that_overlap_have_a_lane_each(browser: Browser, daemon: Daemon) -> None:
    first, second = busy(2, saves=1).roots[0].recent, busy(2, saves=1).roots[0].in_flight
    late = [msgspec.structs.replace(save, began_at=save.began_at - 95, staged_at=NOW - 98) for save in second]
    daemon.shown = daemon_status(root_status(BUSY_ROOT, ranks=busy(2).roots[0].ranks, in_flight=late, recent=first))
    page = await opened(browser, daemon)
    assert await page.locator("svg.timeline .panel").count() == 1
    tops = await page.locator("svg.timeline path.seg.staging").evaluate(
        "e => [...e.getAttribute('d').matchAll(/M[\\d.]+ ([\\d.]+)/g)].map(m => +m[1])"
    )
    assert len(set(tops)) == 4


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
        r"The daemon has not answered since [\d:]{8}\. Below is what it said at .*\. This page goes on asking\.", said
    )
    assert "global_step4100" in await text_of(page, "tr.latest")
    assert (await page.title()).startswith("⚠ ")
    async with serving(hub, url.removeprefix("http://").rstrip("/"), look=lambda _: seen.shown):
        await page.get_by_text("serving", exact=True).wait_for()
        assert await text_of(page, "#alive") == ""


async def test_nobody_has_come_yet(browser: Browser, daemon: Daemon) -> None:
    daemon.shown = daemon_status()
    page = await opened(browser, daemon)
    assert "No trainer has come yet" in await text_of(page, "main")
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
