// Asks the daemon once a second, and keeps the last answer if it does not reply.

import { morph } from "./dom.js";
import { attempts } from "./attempts.js";
import { opensByItself } from "./root.js";
import { told } from "./timeline.js";
import { head, view } from "./view.js";
import { clock } from "./formatting.js";

const VISIBLE_MS = 1000, HIDDEN_MS = 10_000, ANSWER_MS = 5000;
const ui = { width: 0, sameScale: null, opened: new Set(), shown: new Map(), chosen: new Map(), drawn: new Map(), charts: new Map(), lost: false };
let status = null, lostSince = null, timer = null, asking = false;

async function ask() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  try {
    const answer = await fetch("api/status", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!answer.ok) throw new Error(`the daemon answers ${answer.status}`);
    status = await answer.json();
    lostSince = null;
  } catch {
    lostSince ??= Date.now() / 1000;
  } finally {
    asking = false;
  }
  render();
  timer = setTimeout(ask, document.hidden ? HIDDEN_MS : VISIBLE_MS);
}

function render() {
  say();
  if (status === null) return;
  ui.lost = lostSince !== null;
  noticeFolds();
  const page = document.getElementById("view");
  ui.width = widthOf(page);
  ui.sameScale ??= comparable();
  ui.drawn.clear();
  ui.charts.clear();
  document.title = `${ui.lost ? "⚠ " : ""}checkpointd on ${status.host}`;
  const focused = document.activeElement;
  morph(document.getElementById("head"), head(status, lostSince));
  morph(page, view(status, isOpen, ui));
  for (const card of cards()) {
    card.open = isOpen(rootOf(card));
    ui.shown.set(card.dataset.root, card.open);
  }
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true }); // morph() moved it
}

/** The width for pictures in a card. */
const widthOf = (page) => Math.max(240, page.clientWidth - (innerWidth > 640 ? 48 : 30));

const cards = () => document.querySelectorAll("details[data-root]");
const isTurned = (card) => ui.shown.has(card.dataset.root) && ui.shown.get(card.dataset.root) !== card.open;

/** If a card is not as it was last shown, the reader has folded or unfolded it. */
function noticeFolds() {
  for (const card of cards()) if (isTurned(card)) ui.chosen.set(card.dataset.root, card.open);
}

const rootOf = (card) => status.roots.find((root) => root.root === card.dataset.root);

/** Whether a root is unfolded: by the reader's choice, or else if it needs a look. */
function isOpen(root) {
  return ui.chosen.get(root.root) ?? opensByItself(root, status.roots);
}

/** Change the text only if needed, because a screen reader would read it out each time. */
function say() {
  const below = status === null ? "" : ` Below is what it said at ${clock(status.now)}.`;
  const text = lostSince === null ? "" : `The daemon has not answered since ${clock(lostSince)}.${below} This page goes on asking.`;
  const line = document.getElementById("alive");
  if (line.textContent !== text) line.textContent = text;
  line.className = text ? "note bad" : "";
}

/** Whether one time scale suits all the saves that are shown. */
function comparable() {
  const seconds = status.roots.flatMap((root) => attempts(root.recent, status.now).map((attempt) => attempt.ended - attempt.began));
  if (!seconds.length) return null;
  return Math.max(...seconds) < 5 * Math.max(1e-3, Math.min(...seconds));
}

document.addEventListener("change", (event) => {
  if (event.target.dataset?.action === "scale") {
    ui.sameScale = event.target.checked;
    render();
    for (const box of document.querySelectorAll("[data-action=scale]")) box.checked = ui.sameScale;
  }
});
document.addEventListener("toggle", (event) => {
  if (event.target.dataset?.root && isTurned(event.target)) render();
  const key = event.target.dataset?.details;
  if (!key) return;
  const known = ui.opened.has(key);
  if (event.target.open) ui.opened.add(key);
  else ui.opened.delete(key);
  if (known !== event.target.open) render();
}, true);
document.addEventListener("pointermove", (event) => {
  const tip = document.getElementById("tip"), svg = event.target.closest?.("svg[data-timeline], svg[data-chart]");
  const text = svg && pointedAt(svg, event);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
});

/** The text for the point of a picture under the pointer. */
function pointedAt(svg, event) {
  const box = svg.getBoundingClientRect(), x = event.clientX - box.left;
  if (svg.dataset.chart) return ui.charts.get(svg.dataset.chart)?.(x / box.width);
  const drawn = ui.drawn.get(svg.dataset.timeline);
  return drawn && told(drawn, x, event.clientY - box.top, status.now);
}

document.addEventListener("visibilitychange", () => !document.hidden && ask());
new ResizeObserver(() => status && Math.abs(widthOf(document.getElementById("view")) - ui.width) > 1 && render()).observe(document.body);
ask();
