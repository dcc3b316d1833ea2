// The time that each part of the last save took: the median of the ranks, and the slowest rank.

import { h } from "./dom.js";
import { attempts } from "./attempts.js";
import { name } from "./elements.js";
import { duration, median } from "./formatting.js";

const PARTS = [
  ["staging", "Staging", false],
  ["persisting", "Persisting", false],
  ["hash", "hashing", true],
  ["codec", "encoding", true],
  ["disk", "writing", true],
  ["uploading", "Uploading from the spool", false],
  ["waiting", "Waiting for votes", false],
];

/** The times of the newest commit; null if they are unknown. */
export function spent(root, now) {
  const last = attempts(root.recent, now).reverse().find((attempt) => attempt.saves.some((save) => save.phase === "committed"));
  const parts = last ? PARTS.map(([key, label, isPart]) => ({ label, isPart, ranks: known(last.saves, key) })).filter(({ ranks }) => ranks.length) : [];
  if (!parts.length) return null;
  const longest = Math.max(1e-6, ...parts.map(({ ranks }) => ranks.at(-1)[0]));
  return h(
    "section",
    { class: "part", "aria-label": "Where the time went" },
    h("h3", null, "Where the time of ", name(last.tag), " went"),
    h("p", { class: "facts" }, "The slowest rank. Hashing, encoding and writing are parts of persisting, and overlap."),
    h("ul", { class: "bars spent" }, parts.map((part) => row(part, longest, last.saves.length))),
  );
}

/** Seconds of a part with their ranks, the slowest last. */
const known = (saves, key) => saves.map((save) => [save.seconds?.[key] ?? null, save.rank]).filter(([seconds]) => seconds !== null).sort((a, b) => a[0] - b[0]);

function row({ label, isPart, ranks }, longest, of) {
  const [most, rank] = ranks.at(-1), middle = median(ranks.map(([seconds]) => seconds));
  return h(
    "li",
    { class: isPart ? "within" : null },
    h("span", { class: "who" }, label),
    h("progress", { max: 1, value: (most / longest).toFixed(4), "aria-label": `${label}: ${duration(most)}` }),
    h("span", { class: "what" }, duration(most), of > 1 && `, rank ${rank}; median ${duration(middle)}`),
  );
}
