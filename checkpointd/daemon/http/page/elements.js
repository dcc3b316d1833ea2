// Elements that every part of the page uses: names, badges, unknown values, tiles and tables.

import { h } from "./dom.js";
import { printable } from "./formatting.js";

export const name = (text) => h("bdi", null, printable(text));
export const badge = (text, mood) => h("span", { class: `badge ${mood}` }, text);

/** An unknown value is shown as a dash that says why, never as a zero. */
export const unknown = (why) => h("span", { class: "unknown", title: `not known: ${why}`, role: "img", "aria-label": `not known: ${why}` }, "—");

/** A number with its name. If `value` is null, it is unknown and `note` says why. `mood` marks a number that needs a look. */
export function tile(label, value, note, mood) {
  const shown = value === null ? unknown(note) : value;
  return h("div", { class: mood ? `tile is-${mood}` : "tile" }, h("dt", null, label), h("dd", null, shown, note && h("small", null, note)));
}

export const number = (text) => ({ class: "number", content: text });

/** A table in a box that scrolls; on a narrow screen each row becomes a list of its own. A cell is a text, an element, a list of
 * these, or `number(...)`. `rows`: [{cells, mark}].
 */
export function table(label, titles, rows, notes = {}) {
  const isNumber = (at) => rows.some(({ cells }) => cells[at]?.class === "number");
  const head = titles.map((title, at) => h("th", { scope: "col", class: isNumber(at) ? "number" : null, title: notes[title] }, title));
  const cell = (content, at) => {
    const { class: kind, content: inner } = content?.class === "number" ? content : { content };
    return h("td", { class: kind, "data-label": titles[at] }, h("span", null, inner));
  };
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, rows.map(({ cells, mark }) => h("tr", { class: mark }, cells.map(cell))))),
  );
}

/** Details that open at a click. Their content is made only while they are open. */
export function folded(ui, key, title, content) {
  return h("details", { "data-key": key, "data-details": key }, h("summary", null, title), ui.opened.has(key) && content());
}
