// Makes the page from a status. Pure functions.

import { h } from "./dom.js";
import { attempts } from "./attempts.js";
import { badge, folded, name } from "./elements.js";
import { rootCard } from "./root.js";
import { textures } from "./timeline.js";
import { clock, count, duration, printable, ranks as rankWords, size, sizeOf, speed } from "./formatting.js";

const HELD_MAX = 4;

/** The head of the page. `lost`: since when the daemon has not answered, null while it does. */
export function head(status, lost) {
  const state = lost !== null ? badge("not answering", "bad") : status.leaving ? badge("leaving", "doubt") : badge("serving", "good");
  return h(
    "header",
    { id: "head" },
    h("h1", null, "checkpointd", h("span", { class: "host" }, " on ", name(status.host))),
    state,
    h("span", { class: "counts" }, lost === null && counts(status.roots)),
    h("span", { class: "quiet time" }, `up ${duration(status.now - status.started_at)}, as of ${clock(status.now)}`),
  );
}

/** `20 roots: 2 failing, 3 healthy`, in the order in which they stand below. */
function counts(roots) {
  if (roots.length < 2) return null;
  const found = new Map();
  for (const root of roots) found.set(root.verdict.state, (found.get(root.verdict.state) ?? 0) + 1);
  return `${count(roots.length, "root")}: ${[...found].map(([state, n]) => `${n} ${state}`).join(", ")}`;
}

/** `isOpen(root)`: whether it is unfolded. */
export function view(status, isOpen, ui) {
  return h(
    "main",
    { id: "view", class: ui.lost ? "lost" : null },
    status.leaving && h("p", { class: "note doubt", "data-key": "leaving" }, "The daemon was told to stop: it finishes the saves in flight and takes no new ones."),
    (status.left_out || []).map((words, at) => h("p", { class: "note doubt", "data-key": `left-out-${at}` }, printable(words))),
    status.roots.length === 0 && nothingYet(status),
    textures(),
    h("div", { class: "roots", "data-key": "roots" }, status.roots.map((root) => rootCard(root, isOpen(root), status.now, ui))),
    mirrors(status),
    exports(status),
    memory(status, ui),
    daemon(status),
  );
}

function nothingYet(status) {
  return h(
    "section",
    { class: "card" },
    h("h2", null, "No trainer has come yet"),
    h("p", null, "A job uses this daemon with ", h("code", null, `Checkpointer(root, sidecar="${printable(status.socket)}")`), "."),
  );
}

// --- mirrors and exports ---------------------------------------------------------------------------------------------

const MOODS = { "in step": "good", "up to date": "good", failing: "bad", over: "bad" };

function mirrors(status) {
  const words = (one) => [one.behind > 0 && `, ${count(one.behind, "checkpoint")} behind`];
  const found = (status.mirrors || []).map((one) => ({ ...one, root: one.origin, to: one.mirror, upToDateAt: one.in_step_at }));
  return followed("Mirrors", found, "in step", status.now, words);
}

function exports(status) {
  const words = (one) => [
    one.state === "waiting" && `: ${printable(one.holder)} exports there`,
    one.due > 1 && `, ${count(one.due, "checkpoint")} due`,
    one.last_s !== null && `, the last one took ${duration(one.last_s)}`,
  ];
  const found = (status.exports || []).map((one) => ({ ...one, upToDateAt: one.up_to_date_at }));
  return followed("Exports", found, "up to date", status.now, words);
}

/** The card of roots that are mirrored or exported. `done`: the state of one that has nothing to do. `words`: what else it says. */
function followed(title, found, done, now, words) {
  if (!found.length) return null;
  const line = (one) =>
    h(
      "li",
      null,
      badge(one.state, MOODS[one.state] ?? "quiet"),
      " ",
      name(one.root),
      " to ",
      name(one.to),
      one.tag && `: ${printable(one.tag)}, ${sizeOf(one.done_bytes, one.total_bytes)}`,
      words(one),
      one.newest_tag !== null && h("span", null, ", newest ", name(one.newest_tag)),
      one.upToDateAt !== null && one.state !== done && `, ${done} ${duration(now - one.upToDateAt)} ago`,
      one.problem && h("p", { class: "note bad" }, printable(one.problem.message)),
    );
  return h("section", { class: "card", "aria-label": title }, h("h2", null, title), h("ul", { class: "plain" }, found.map(line)));
}

// --- the daemon --------------------------------------------------------------------------------------------------

function meter(label, used, limit, note) {
  return h(
    "div",
    { class: "meter" },
    h("span", null, label),
    h("progress", { max: Math.max(1, limit), value: Math.min(used, Math.max(1, limit)), "aria-label": label }),
    h("span", { class: "quiet" }, `${size(used)} of ${size(limit)}${note}`),
  );
}

function memory(status, ui) {
  const m = status.memory;
  const held = status.roots.flatMap((root) => attempts(root.held.map((one) => ({ ...one, began_at: one.step, ended_at: null })), 0).map((a) => [root, a]));
  const line = ([root, a]) => {
    const nbytes = a.saves.reduce((sum, one) => sum + one.nbytes, 0);
    return h("li", null, name(a.tag), ` of ${rankWords(a.saves.map((one) => one.rank))}, ${size(nbytes)}, ${a.saves.every((one) => one.phase === "committed") ? "committed" : "not committed yet"}`, status.roots.length > 1 && h("small", null, name(root.root)));
  };
  const all = () => h("ul", { class: "plain" }, held.map(line));
  return h(
    "section",
    { class: "card", "aria-label": "Memory" },
    h("h2", null, "Memory for restarts"),
    meter("Snapshots held", m.held, m.held_max, ""),
    meter("Snapshots mapped", m.mapped, m.mapped_max, ""),
    !held.length && h("p", { class: "facts" }, "No snapshot is held: a trainer that starts again loads from the store."),
    held.length > HELD_MAX ? folded(ui, "held", `${held.length} snapshots are held`, all) : all(),
  );
}

/** How many requests were refused, and why. */
function refused(status) {
  const reasons = Object.entries(status.refusals).filter(([, n]) => n).map(([reason, n]) => `${n.toLocaleString("en")} ${reason}`);
  return `${status.refused.toLocaleString("en")}${reasons.length ? ` (${reasons.join(", ")})` : ""}`;
}

/** What waits in the spool, and what did not go through it. */
function spool(found) {
  const facts = [printable(found.directory), `${found.waiting.toLocaleString("en")} shards wait (${size(found.waiting_bytes)})`];
  if (found.used_bytes !== null) facts.push(`${size(found.used_bytes)} used, ${size(found.free_bytes)} free`);
  if (found.superseded) facts.push(`${found.superseded.toLocaleString("en")} superseded`);
  if (found.direct_full) facts.push(`${found.direct_full.toLocaleString("en")} straight to the root, since it was full`);
  if (found.direct_failed) facts.push(`${found.direct_failed.toLocaleString("en")} straight to the root, since its disk failed`);
  return facts.join(", ");
}

function daemon(status) {
  const facts = [
    ["Release", status.release],
    ["Process", String(status.pid)],
    ["Socket", name(status.socket)],
    ["Serves", (status.serves || []).map((one, at) => [at > 0 && ", ", name(one)])],
    ["Running since", clock(status.started_at)],
    ["Connections", `${status.clients} of ${status.clients_max}`],
    ["Refused", refused(status)],
    ["Bandwidth limit", status.bandwidth_bps === null ? "none" : speed(status.bandwidth_bps)],
    ...(status.spool ? [["Spool", spool(status.spool)]] : []),
  ];
  return h(
    "section",
    { class: "card", "aria-label": "The daemon" },
    h("h2", null, "The daemon"),
    h("dl", { class: "pairs" }, facts.map(([label, value]) => h("div", null, h("dt", null, label), h("dd", null, value)))),
    h("p", { class: "facts" }, "For machines: ", h("a", { href: "api/status" }, "status as JSON"), " and ", h("a", { href: "metrics" }, "metrics for Prometheus"), "."),
  );
}
