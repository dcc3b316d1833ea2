// The last saves of every rank as a picture: one panel for each save, one row for each rank. Panels stand side by side in
// the order of time; what lies between two saves is left out.

import { h, s } from "./dom.js";
import { attempts, pieces } from "./attempts.js";
import { clock, count, duration, printable, shortened } from "./words.js";

export const KINDS = [
  ["staging", "staging: copying the snapshot"],
  ["waiting", "staged, waiting"],
  ["persisting", "persisting: making it durable"],
  ["voted", "voted, waiting for the commit"],
  ["lost", "ended, not committed"],
];
const PANELS_MAX = 6, PANEL_MIN = 150, GAP = 14, HEAD = 38, AXIS = 24, ROWS_MAX = 460;

/** Attempts whose times overlap are drawn together: [{attempts, from, to}], oldest first. */
export function panelsOf(found) {
  const panels = [];
  for (const attempt of found) {
    const last = panels.at(-1);
    if (last && attempt.began <= last.to) {
      last.attempts.push(attempt);
      last.to = Math.max(last.to, attempt.ended);
    } else panels.push({ attempts: [attempt], from: attempt.began, to: attempt.ended });
  }
  return panels;
}

/** What is drawn, in pixels; null where there is nothing. */
export function layout(root, now, width, sameScale) {
  const found = attempts([...root.recent, ...root.in_flight], now);
  const ranks = [...new Set([...root.ranks, ...found.flatMap((a) => a.saves)].map((x) => x.rank))].sort((a, b) => a - b);
  if (!found.length) return null;
  const left = 22 + 8 * String(ranks.at(-1)).length;
  const most = Math.max(1, Math.min(PANELS_MAX, Math.floor((width - left) / (PANEL_MIN + GAP))));
  const panels = panelsOf(found).slice(-most);
  const each = Math.min(360, Math.floor((width - left - GAP * (panels.length - 1)) / panels.length));
  const row = Math.max(2, Math.min(20, Math.floor(ROWS_MAX / ranks.length)));
  const longest = Math.max(...panels.map((panel) => panel.to - panel.from));
  panels.forEach((panel, at) => {
    panel.x = left + at * (each + GAP);
    panel.width = each;
    panel.seconds = Math.max(1e-3, sameScale ? longest : panel.to - panel.from);
    panel.lanes = panel.attempts.length > 1 && row >= 4 ? 2 : 1;
    panel.at = (time) => panel.x + ((time - panel.from) / panel.seconds) * each;
  });
  return { panels, ranks, rowOf: new Map(ranks.map((rank, at) => [rank, at])), row, left, width, height: HEAD + row * ranks.length + AXIS };
}

/** The box of a save in the picture: its rank's row, or one half of it where two saves of a rank overlap. */
function band(drawn, panel, attemptAt, rank) {
  const gap = drawn.row > 6 ? 3 : drawn.row > 3 ? 1 : 0;
  const tall = (drawn.row - gap) / panel.lanes;
  return [HEAD + drawn.rowOf.get(rank) * drawn.row + gap / 2 + (attemptAt % panel.lanes) * tall, tall];
}

export function picture(drawn, now, key) {
  const label = summary(drawn);
  return s(
    "svg",
    { class: "timeline", role: "img", "aria-label": label, width: drawn.width, height: drawn.height, "data-timeline": key },
    s("defs", null, hatch()),
    rankLabels(drawn),
    drawn.panels.map((panel) => drawPanel(drawn, panel, now)),
  );
}

function summary(drawn) {
  const told = drawn.panels.flatMap((panel) => panel.attempts.map((a) => `${printable(a.tag)} ${a.live ? "has taken" : "took"} ${duration(a.ended - a.began)}`));
  return `Timeline of the last saves of ${count(drawn.ranks.length, "rank")}: ${told.join("; ")}. The table below has the numbers.`;
}

function hatch() {
  return s(
    "pattern",
    { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { class: "hatch-back", width: 6, height: 6 }),
    s("rect", { class: "hatch-line", width: 3, height: 6 }),
  );
}

function rankLabels(drawn) {
  const every = [1, 2, 4, 8, 16, 32, 64, 128].find((n) => n * drawn.row >= 15) ?? 256;
  return drawn.ranks
    .filter((_, at) => at % every === 0)
    .map((rank) => s("text", { class: "label", x: drawn.left - 8, y: HEAD + (drawn.rowOf.get(rank) + 0.5) * drawn.row, "text-anchor": "end", "dominant-baseline": "central" }, String(rank)));
}

function drawPanel(drawn, panel, now) {
  const bottom = HEAD + drawn.row * drawn.ranks.length;
  const paths = new Map(KINDS.map(([kind]) => [kind, []]));
  panel.attempts.forEach((attempt, at) => {
    for (const save of attempt.saves) {
      const [y, tall] = band(drawn, panel, at, save.rank);
      for (const [kind, from, to] of pieces(save, now)) {
        const x = panel.at(from), wide = Math.max(kind === "waiting" ? 0 : 1, panel.at(to) - x);
        if (wide > 0) paths.get(kind).push(`M${x.toFixed(1)} ${y.toFixed(1)}h${wide.toFixed(1)}v${tall.toFixed(1)}h${(-wide).toFixed(1)}z`);
      }
    }
  });
  return s(
    "g",
    { "data-key": panel.attempts[0].key },
    s("rect", { class: "panel", x: panel.x, y: HEAD, width: panel.width, height: bottom - HEAD }),
    ticks(panel, bottom),
    [...paths].filter(([, parts]) => parts.length).map(([kind, parts]) => s("path", { class: `seg ${kind}`, d: parts.join("") })),
    panel.attempts.map((attempt) => commitLine(panel, attempt, bottom)),
    panel.attempts.some((attempt) => attempt.live) && s("path", { class: "now", d: `M${panel.at(now).toFixed(1)} ${HEAD - 3}V${bottom + 3}` }),
    heading(panel, now),
  );
}

function commitLine(panel, attempt, bottom) {
  const times = attempt.saves.filter((save) => save.phase === "committed" && save.ended_at !== null).map((save) => save.ended_at);
  if (!times.length) return null;
  const x = Math.min(panel.at(Math.min(...times)), panel.x + panel.width - 1).toFixed(1);
  return s("path", { class: "committed", d: `M${x} ${HEAD - 3}V${bottom + 3}` });
}

function heading(panel, now) {
  const tags = panel.attempts.map((attempt) => printable(attempt.tag)).join(", ");
  const live = panel.attempts.some((attempt) => attempt.live);
  const took = `${duration(panel.to - panel.from)}${live ? " so far" : ""}`;
  return s( // an inner picture cuts off what does not fit
    "svg",
    { x: panel.x, y: 0, width: panel.width, height: HEAD },
    s("text", { class: "panel-tag", y: 13 }, shortened(tags, Math.floor(panel.width / 7.4)), s("title", null, tags)),
    s("text", { class: "label", y: 29 }, `${clock(panel.from, now)} · ${took}`),
  );
}

function ticks(panel, bottom) {
  const step = niceStep(panel.seconds / Math.max(2, panel.width / 44));
  const times = [];
  for (let at = 0; at <= panel.seconds * 1.0001; at += step) times.push(at);
  return times.map((at) => {
    const x = panel.x + (at / panel.seconds) * panel.width;
    const anchor = at === 0 ? "start" : x > panel.x + panel.width - 28 ? "end" : "middle";
    return [
      s("path", { class: "grid", d: `M${x.toFixed(1)} ${HEAD}V${bottom}` }),
      s("text", { class: "label", x: x.toFixed(1), y: bottom + 16, "text-anchor": anchor }, at === 0 ? "0" : tick(at, step)),
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

/** What lies at a point of the picture, in words; null where nothing does. */
export function told(drawn, x, y, now) {
  const rank = drawn.ranks[Math.floor((y - HEAD) / drawn.row)];
  const panel = drawn.panels.find((p) => x >= p.x && x <= p.x + p.width);
  if (rank === undefined || !panel || y < HEAD) return null;
  const time = panel.from + ((x - panel.x) / panel.width) * panel.seconds;
  const mine = panel.attempts.flatMap((a) => a.saves).filter((save) => save.rank === rank);
  const save = mine.findLast((one) => one.began_at <= time) ?? mine[0];
  if (!save) return `rank ${rank}: no save here is known`;
  const steps = pieces(save, now).filter(([, from, to]) => to - from > 5e-4).map(([kind, from, to]) => `${kind === "lost" ? save.phase : kind} ${duration(to - from)}`);
  return `rank ${rank} · ${printable(save.tag)} · ${save.phase}\n${steps.join(" → ")}`;
}

/** The same as rows, for those who cannot see a picture, newest first. */
export function table(drawn, now) {
  const rows = drawn.panels.flatMap((panel) => panel.attempts).reverse().flatMap((attempt) => attempt.saves);
  const cell = (save, kind) => {
    const piece = pieces(save, now).find(([name]) => name === kind);
    return h("td", { class: "number" }, piece ? duration(piece[2] - piece[1]) : "–");
  };
  const titles = ["Tag", "Rank", "Ended as", "Staging", "Waiting", "Persisting", "Voted", "Lost"];
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Timeline as a table" },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, titles.map((title, at) => h("th", { scope: "col", class: at === 1 || at > 2 ? "number" : null }, title)))),
      h("tbody", null, rows.map((save) => h("tr", null, h("td", null, h("bdi", null, printable(save.tag))), h("td", { class: "number" }, String(save.rank)), h("td", null, save.phase), KINDS.map(([kind]) => cell(save, kind))))),
    ),
  );
}

export function legend() {
  const swatch = (kind) => s("svg", { class: "swatch", width: 16, height: 12, "aria-hidden": "true" }, s("rect", { class: `seg ${kind}`, width: 16, height: 12, rx: 2 }));
  const line = s("svg", { class: "swatch", width: 16, height: 12, "aria-hidden": "true" }, s("path", { class: "committed", d: "M8 0V12" }));
  return h("ul", { class: "legend" }, KINDS.map(([kind, words]) => h("li", null, swatch(kind), words)), h("li", null, line, "committed"));
}

