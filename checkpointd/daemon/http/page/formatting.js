// Numbers, times and foreign text as people read them. Bytes, seconds, and seconds since 1970.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
// Control characters, and those that turn the direction of text: anybody may choose the names in a checkpoint.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function printable(text) {
  return text.replace(UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function size(bytes) {
  let value = bytes, unit = 0;
  while (value >= 1023.95 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return unit ? `${value.toFixed(1)} ${UNITS[unit]}` : `${bytes} B`;
}

/** How much of `total` is `done`: never more than the whole, though what is written again counts twice. */
export const sizeOf = (done, total) => `${size(Math.min(done, total))} of ${size(total)}`;

export const speed = (bytesPerSecond) => `${size(Math.round(bytesPerSecond))}/s`;

export function duration(seconds) {
  const t = Math.max(0, seconds);
  if (t < 0.9995) return `${Math.round(t * 1000)} ms`;
  if (t < 9.95) return `${t.toFixed(1)} s`;
  if (t < 99.5) return `${Math.round(t)} s`;
  if (t < 3600) return `${Math.floor(t / 60)} min ${String(Math.floor(t % 60)).padStart(2, "0")} s`;
  if (t < 86400) return `${Math.floor(t / 3600)} h ${String(Math.floor((t % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(t / 86400)} d ${Math.floor((t % 86400) / 3600)} h`;
}

/** A rough length of time. */
export function about(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    const value = seconds / length;
    if (value >= 1.95) return `${value >= 9.95 ? Math.round(value) : +value.toFixed(1)} ${unit}`;
  }
  return duration(seconds);
}

/** The middle value; of an even number of values, the mean of the two in the middle. */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b), at = sorted.length >> 1;
  return sorted.length % 2 ? sorted[at] : (sorted[at - 1] + sorted[at]) / 2;
}

/** A number of any size in four digits. */
export const figure = (value) => (Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4)));

export const ago = (seconds) => (seconds < 1 ? "just now" : `${duration(seconds)} ago`);

/** A time as every part of checkpointd shows it: `2026-11-28T09:30:11Z`. */
export const clock = (time) => `${new Date(time * 1000).toISOString().slice(0, 19)}Z`;

/** The same without the date, where there is no room for it. */
export const timeOfDay = (time) => clock(time).slice(11);

export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** `rank 3`, or `ranks 0, 1 and 5 more`; runs are drawn together. */
export function ranks(numbers, most = 8) {
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else runs.push([n, n]);
  }
  const words = runs.slice(0, most).map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  const told = runs.slice(0, most).reduce((sum, [a, b]) => sum + b - a + 1, 0);
  const more = numbers.length - told;
  return `rank${numbers.length === 1 ? "" : "s"} ${words.join(", ")}${more ? ` and ${more} more` : ""}`;
}

export const percent = (fraction) => `${Math.floor(Math.min(1, Math.max(0, fraction)) * 100)} %`;

/** `text` of at most `most` characters; the end of a name tells more than its middle. */
export function shortened(text, most) {
  const characters = [...text];
  if (characters.length <= most) return text;
  const tail = Math.floor((most - 1) / 2);
  return `${characters.slice(0, Math.max(0, most - 1 - tail)).join("")}…${tail > 0 ? characters.slice(-tail).join("") : ""}`;
}
