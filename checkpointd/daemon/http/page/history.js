// A root over time: small pictures of its last saves, oldest left, and the same as a table.

import { h, s } from "./dom.js";
import { folded, name, number, table, unknown } from "./elements.js";
import { clock, count, duration, figure, median, printable, size, speed } from "./formatting.js";

const TALL = 40, WIDE = 100;
const UNTIMED = "a later start committed it, and does not know when save() was called";

/** Why a chart has no value for a save. */
const why = (past, one) => (past.committed ? one.unknown : "it did not commit");

const throughput = (past) => (past.raw_bytes && past.took_s ? past.raw_bytes / past.took_s : null);

/** The charts of the saves: {key, label, value, words, worst}. */
function series(saves) {
  const metrics = [...new Set(saves.flatMap((past) => Object.keys(past.metrics)))].sort();
  return [
    { key: "took", label: "Save to commit", value: (past) => past.took_s, words: duration, worst: ["longest", Math.max], zero: true, unknown: UNTIMED },
    { key: "throughput", label: "Throughput", value: throughput, words: speed, worst: ["least", Math.min], zero: true, unknown: UNTIMED },
    { key: "held", label: "Training held", value: (past) => past.held_s, words: duration, worst: ["longest", Math.max], zero: true, unknown: "its ranks did not measure it" },
    { key: "size", label: "Size on disk", value: (past) => past.stored_bytes, words: size, worst: ["largest", Math.max], zero: true, unknown: "its ranks wrote no tensors" },
    ...metrics.slice(0, 3).map((metric) => ({ key: `metric ${metric}`, label: `Metric ${printable(metric)}`, value: (past) => past.metrics[metric] ?? null, words: figure, worst: null, zero: false, unknown: "it was saved without this metric" })),
  ];
}

export function history(root, ui) {
  const saves = root.history;
  if (!saves.length) return null;
  const shown = series(saves);
  const failed = saves.filter((past) => !past.committed).length;
  const lost = failed ? `; ${failed} did not commit, marked below the line` : "";
  return h(
    "section",
    { class: "part", "aria-label": "History" },
    h("h3", null, "History"),
    h("p", { class: "facts" }, `The last ${count(saves.length, "save")}, from ${clock(saves[0].at)} to ${clock(saves.at(-1).at)}, oldest left${lost}.`),
    h("div", { class: "charts" }, shown.map((one) => chart(root, saves, one, ui))),
    folded(ui, `history ${root.root}`, "The history as a table", () => asTable(saves, shown)),
  );
}

function chart(root, saves, one, ui) {
  const values = saves.map((past) => (past.committed ? one.value(past) : null));
  const known = values.filter((value) => value !== null);
  const last = known.at(-1) ?? null;
  const note = !known.length ? why(saves.at(-1), one) : one.worst ? `median ${one.words(median(known))}, ${one.worst[0]} ${one.words(one.worst[1](...known))}` : `${one.words(Math.min(...known))} to ${one.words(Math.max(...known))}`;
  const key = `${root.root} ${one.key}`;
  ui.charts.set(key, (part) => told(saves, one, part));
  return h(
    "figure",
    { class: "chart", "data-key": one.key },
    h("figcaption", null, h("span", { class: "label" }, one.label), h("strong", null, last === null ? unknown(note) : one.words(last)), h("small", null, note)),
    known.length > 1 && drawn(saves, values, one, key, `${one.label} of the last ${known.length} saves: ${note}, now ${one.words(last)}`),
  );
}

function drawn(saves, values, one, key, label) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known), low = one.zero ? 0 : Math.min(...known);
  const x = (at) => (saves.length > 1 ? 1 + (at / (saves.length - 1)) * (WIDE - 2) : WIDE / 2).toFixed(2);
  const y = (value) => (TALL - 6 - (top > low ? (value - low) / (top - low) : 0.5) * (TALL - 10)).toFixed(2);
  let line = "", pen = "M";
  values.forEach((value, at) => {
    if (value === null) pen = saves[at].committed ? "M" : pen; // a save that did not commit does not interrupt the line
    else [line, pen] = [`${line}${pen}${x(at)} ${y(value)}`, "L"];
  });
  const lost = saves.map((past, at) => (past.committed ? "" : `M${x(at)} ${TALL}v-5`)).join("");
  const end = values.findLastIndex((value) => value !== null);
  return s(
    "svg",
    { class: "spark", role: "img", "aria-label": label, viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", "data-chart": key },
    s("path", { class: "base", d: `M0 ${TALL - 6}H${WIDE}` }),
    s("path", { class: "line", d: line }),
    s("path", { class: "end", d: `M${x(end)} ${y(values[end])}h0` }),
    lost && s("path", { class: "miss", d: lost }),
  );
}

/** The save at a position of the width, from 0 to 1, in words. */
function told(saves, one, part) {
  const past = saves[Math.round(Math.min(1, Math.max(0, part)) * (saves.length - 1))];
  const value = one.value(past);
  const words = value === null ? `not known: ${why(past, one)}` : one.words(value);
  return `${printable(past.tag)} · ${clock(past.at)}\n${one.label}: ${words}`;
}

function asTable(saves, shown) {
  const cell = (past, one) => {
    const value = one.value(past);
    return number(value === null ? unknown(why(past, one)) : one.words(value));
  };
  const rows = [...saves].reverse().map((past) => ({
    cells: [name(past.tag), number(past.step.toLocaleString("en")), clock(past.at), past.committed ? "committed" : "not committed", ...shown.map((one) => cell(past, one))],
  }));
  return table("History as a table", ["Tag", "Step", "When", "Ended as", ...shown.map((one) => one.label)], rows);
}
