// The last saves of every rank as a picture: one panel for each save, on a scale of its own, one row for each rank. Panels stand
// side by side in the order in which the saves began; the time between two saves is left out.

import { h, s } from "./dom.js";
import { attempts, pieces } from "./attempts.js";
import { name, number } from "./elements.js";
import { clock, count, duration, printable, shortened, timeOfDay } from "./formatting.js";

export const KINDS = [
  ["staging", "staging: copying the snapshot"],
  ["waiting", "staged, waiting"],
  ["persisting", "persisting: making it durable"],
  ["spooled", "in the spool, waiting for its upload"],
  ["uploading", "uploading from the spool"],
  ["voted", "voted, waiting for the commit"],
  ["unmeasured", "not measured in parts"],
  ["lost", "ended, not committed"],
];
/** The kinds that the legend and the table have only if they occur. */
const RARE = ["spooled", "uploading", "unmeasured", "lost"];
const PANELS_MAX = 6, PANEL_MIN = 138, GAP = 14, LINE = 15, AXIS = 24, ROWS_MAX = 460, LETTER = 7, TAG_LETTER = 7.8, TAG_LINES = 4;

/** The picture in pixels; null if there are no saves. */
export function layout(root, now, width, sameScale) {
  const found = attempts([...root.recent, ...root.in_flight], now);
  const ranks = [...new Set([...root.ranks, ...found.flatMap((a) => a.saves)].map((x) => x.rank))].sort((a, b) => a - b);
  if (!found.length) return null;
  const left = 22 + 8 * String(ranks.at(-1)).length;
  const most = Math.max(1, Math.min(PANELS_MAX, Math.floor((width - left + GAP) / (PANEL_MIN + GAP))));
  const shown = found.slice(-most);
  const each = Math.min(360, Math.floor((width - left - GAP * (shown.length - 1)) / shown.length));
  const row = Math.max(2, Math.min(20, Math.floor(ROWS_MAX / ranks.length)));
  const longest = Math.max(...shown.map((attempt) => attempt.ended - attempt.began));
  const panels = shown.map((attempt, at) => {
    const before = found[found.indexOf(attempt) - 1];
    const seconds = Math.max(1e-3, sameScale ? longest : attempt.ended - attempt.began);
    const x = left + at * (each + GAP);
    return { attempt, x, width: each, seconds, overlap: overlap(before, attempt), at: (time) => x + ((time - attempt.began) / seconds) * each };
  });
  const head = 23 + LINE * Math.max(...panels.map((panel) => tagLines(panel).length));
  return { panels, ranks, rowOf: new Map(ranks.map((rank, at) => [rank, at])), row, left, width, head, height: head + row * ranks.length + AXIS };
}

/** The tag of a panel, broken to its width; only a name of more than TAG_LINES lines is shortened. */
function tagLines(panel) {
  const each = Math.floor(panel.width / TAG_LETTER);
  const letters = [...shortened(printable(panel.attempt.tag), each * TAG_LINES)];
  return Array.from({ length: Math.ceil(letters.length / each) }, (_, at) => letters.slice(at * each, (at + 1) * each).join(""));
}

/** How many seconds a save ran at the same time as the save before. */
const overlap = (before, attempt) => (before ? Math.max(0, Math.min(before.ended, attempt.ended) - attempt.began) : 0);

/** The place of a rank's row: its top, and how tall it is. */
function band(drawn, rank) {
  const gap = drawn.row > 6 ? 3 : drawn.row > 3 ? 1 : 0;
  return [drawn.head + drawn.rowOf.get(rank) * drawn.row + gap / 2, drawn.row - gap];
}

export function picture(drawn, now, key) {
  return s(
    "svg",
    { class: "timeline", role: "img", "aria-label": summary(drawn), width: drawn.width, height: drawn.height, "data-timeline": key },
    rankLabels(drawn),
    drawn.panels.map((panel) => drawPanel(drawn, panel, now)),
  );
}

function summary(drawn) {
  const told = drawn.panels.map(({ attempt }) => `${printable(attempt.tag)} ${attempt.live ? "has taken" : "took"} ${duration(attempt.ended - attempt.began)}`);
  return `Timeline of the last saves of ${count(drawn.ranks.length, "rank")}: ${told.join("; ")}. The table below has the numbers.`;
}

/** Textures for two of the kinds, because not everybody can tell the colours apart. Made once for the whole page. */
export function textures() {
  const pattern = (id, turn, ...lines) => s("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: turn }, lines);
  const rect = (kind, width) => s("rect", { class: kind, width, height: 6 });
  return s(
    "svg",
    { class: "textures", "data-key": "textures", width: 0, height: 0, "aria-hidden": "true" },
    s("defs", null, pattern("hatch", "rotate(45)", rect("hatch-back", 6), rect("hatch-line", 3)), pattern("stripes", null, rect("stripe-back", 6), rect("stripe-line", 2))),
  );
}

function rankLabels(drawn) {
  const every = [1, 2, 4, 8, 16, 32, 64, 128].find((n) => n * drawn.row >= 15) ?? 256;
  return drawn.ranks
    .filter((_, at) => at % every === 0)
    .map((rank) => s("text", { class: "label", x: drawn.left - 8, y: drawn.head + (drawn.rowOf.get(rank) + 0.5) * drawn.row, "text-anchor": "end", "dominant-baseline": "central" }, String(rank)));
}

function drawPanel(drawn, panel, now) {
  const bottom = drawn.head + drawn.row * drawn.ranks.length;
  const paths = new Map(KINDS.map(([kind]) => [kind, []]));
  for (const save of panel.attempt.saves) {
    const [y, tall] = band(drawn, save.rank);
    for (const [kind, from, to] of pieces(save, now)) {
      const x = panel.at(from), wide = Math.max(kind === "waiting" ? 0 : 1, panel.at(to) - x);
      if (wide > 0) paths.get(kind).push(`M${x.toFixed(1)} ${y.toFixed(1)}h${wide.toFixed(1)}v${tall.toFixed(1)}h${(-wide).toFixed(1)}z`);
    }
  }
  return s(
    "g",
    { "data-key": panel.attempt.key },
    s("rect", { class: "panel", x: panel.x, y: drawn.head, width: panel.width, height: bottom - drawn.head }),
    ticks(panel, drawn.head, bottom),
    [...paths].filter(([, parts]) => parts.length).map(([kind, parts]) => s("path", { class: `seg ${kind}`, d: parts.join("") })),
    overlapLine(panel, drawn.head),
    commitLine(panel, drawn.head, bottom),
    panel.attempt.live && s("path", { class: "now", d: `M${panel.at(now).toFixed(1)} ${drawn.head - 3}V${bottom + 3}` }),
    heading(panel, drawn.head),
  );
}

/** A line above the rows for the time in which the save before was still under way. */
function overlapLine(panel, head) {
  if (!panel.overlap) return null;
  const wide = Math.min(panel.width, (panel.overlap / panel.seconds) * panel.width);
  return s("path", { class: "overlap", d: `M${panel.x} ${head - 3}h${wide.toFixed(1)}` }, s("title", null, `For ${duration(panel.overlap)} the save before was still under way.`));
}

function commitLine(panel, head, bottom) {
  const times = panel.attempt.saves.filter((save) => save.phase === "committed" && save.ended_at !== null).map((save) => save.ended_at);
  if (!times.length) return null;
  const x = Math.min(panel.at(Math.min(...times)), panel.x + panel.width - 1).toFixed(1);
  return s("path", { class: "committed", d: `M${x} ${head - 3}V${bottom + 3}` });
}

function heading(panel, head) {
  const { attempt } = panel;
  const most = Math.floor(panel.width / LETTER);
  const took = `${duration(attempt.ended - attempt.began)}${attempt.live ? " so far" : ""}`;
  const full = `${clock(attempt.began)} · ${took}`;
  const line = full.length <= most ? full : `${timeOfDay(attempt.began)} · ${took}`; // the date is in the tooltip
  return s( // an inner svg cuts off text that is too wide
    "svg",
    { x: panel.x, y: 0, width: panel.width, height: head },
    s("title", null, `${printable(attempt.tag)} · ${full}`),
    tagLines(panel).map((part, at) => s("text", { class: "panel-tag", y: 13 + LINE * at }, part)),
    s("text", { class: "label", y: head - 9 }, line),
  );
}

/** A line at each step of time, with a label if there is room for it. */
function ticks(panel, head, bottom) {
  const step = niceStep((panel.seconds * 30) / panel.width);
  const times = [];
  for (let at = 0; at <= panel.seconds * 1.0001; at += step) times.push(at);
  let free = -Infinity;
  return times.map((at) => {
    const x = panel.x + (at / panel.seconds) * panel.width, text = at === 0 ? "0" : tick(at, step), wide = LETTER * text.length;
    const from = at === 0 ? x : Math.min(x - wide / 2, panel.x + panel.width - wide);
    const shown = from >= free;
    if (shown) free = from + wide + LETTER;
    return [
      s("path", { class: "grid", d: `M${x.toFixed(1)} ${head}V${bottom}` }),
      shown && s("text", { class: "label tick", x: (from + (at === 0 ? 0 : wide / 2)).toFixed(1), y: bottom + 16, "text-anchor": at === 0 ? "start" : "middle" }, text),
    ];
  });
}

const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];

function niceStep(least) {
  return STEPS.find((step) => step >= least) ?? 86400 * Math.ceil(least / 86400);
}

function tick(at, step) {
  if (step >= 3600) return `${+(at / 3600).toFixed(1)} h`;
  if (step >= 60) return `${+(at / 60).toFixed(1)} min`;
  return step < 0.1 ? `${Math.round(at * 1000)} ms` : `${+at.toFixed(1)} s`;
}

/** The save at a point of the picture, in words; null if there is none. */
export function told(drawn, x, y, now) {
  const rank = drawn.ranks[Math.floor((y - drawn.head) / drawn.row)];
  const panel = drawn.panels.find((p) => x >= p.x && x <= p.x + p.width);
  if (rank === undefined || !panel || y < drawn.head) return null;
  const save = panel.attempt.saves.find((one) => one.rank === rank);
  if (!save) return `rank ${rank}: no save here is known`;
  const steps = pieces(save, now).filter(([, from, to]) => to - from > 5e-4).map(([kind, from, to]) => `${kind === "lost" ? save.phase : kind} ${duration(to - from)}`);
  return `rank ${rank} · ${printable(save.tag)} · ${save.phase}\n${steps.join(" → ")}`;
}

/** The same as rows of a table with TITLES, for those who cannot see a picture, newest first. */
export function rows(drawn, now) {
  const saves = drawn.panels.map((panel) => panel.attempt).reverse().flatMap((attempt) => attempt.saves);
  const cell = (save, kind) => {
    const piece = pieces(save, now).find(([one]) => one === kind);
    return number(piece ? duration(piece[2] - piece[1]) : "–");
  };
  return saves.map((save) => ({ cells: [name(save.tag), number(String(save.rank)), save.phase, ...shownKinds(drawn, now).map(([kind]) => cell(save, kind))] }));
}

const shownKinds = (drawn, now) => {
  const seen = new Set(drawn.panels.flatMap(({ attempt }) => attempt.saves).flatMap((save) => pieces(save, now).map(([kind]) => kind)));
  return KINDS.filter(([kind]) => seen.has(kind) || !RARE.includes(kind));
};

export const titles = (drawn, now) => ["Tag", "Rank", "Ended as", ...shownKinds(drawn, now).map(([kind]) => kind[0].toUpperCase() + kind.slice(1))];

/** The legend of the kinds in the picture. */
export function legend(drawn, now) {
  const swatch = (kind) => s("svg", { class: "swatch", width: 18, height: 12, "aria-hidden": "true" }, s("rect", { class: `seg ${kind}`, width: 18, height: 12, rx: 2 }));
  const line = s("svg", { class: "swatch", width: 18, height: 12, "aria-hidden": "true" }, s("path", { class: "committed", d: "M9 0V12" }));
  const beside = s("svg", { class: "swatch", width: 18, height: 12, "aria-hidden": "true" }, s("path", { class: "overlap", d: "M0 6H18" }));
  return h("ul", { class: "legend" },
    shownKinds(drawn, now).map(([kind, words]) => h("li", null, swatch(kind), words)),
    h("li", null, line, "committed"),
    drawn.panels.some((panel) => panel.overlap) && h("li", null, beside, "beside the save before"),
  );
}
