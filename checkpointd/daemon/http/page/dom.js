// Elements from data. Text only ever becomes text: nothing here, or anywhere on this page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. `attributes` may be null; null and false among the children are left out. */
export function h(name, attributes, ...children) {
  return made(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function s(name, attributes, ...children) {
  return made(document.createElementNS(SVG, name), attributes, children);
}

/** Make `old` the same as `fresh` where they differ, so that focus, selection, scrolling and opened details stay. */
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || key(old) !== key(fresh)) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  attributes(old, fresh);
  children(old, [...fresh.childNodes]);
}

/** Those with a key are found by it, wherever they stood before; the others by their place. */
function children(old, after) {
  const wanted = new Set(after.map(key));
  for (const child of [...old.childNodes]) if (key(child) !== null && !wanted.has(key(child))) child.remove();
  const known = new Map([...old.childNodes].filter((child) => key(child) !== null).map((child) => [key(child), child]));
  let next = old.firstChild;
  for (const child of after) {
    const found = key(child) !== null ? known.get(key(child)) : next && key(next) === null ? next : undefined;
    if (found === undefined) {
      old.insertBefore(child, next);
      continue;
    }
    if (found === next) next = next.nextSibling;
    else old.insertBefore(found, next);
    morph(found, child);
  }
  while (next) {
    const last = next;
    next = next.nextSibling;
    last.remove();
  }
}

/** What an element is found by: `data-key`, or what a section is called. */
function key(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return null;
  return node.getAttribute("data-key") ?? (node.nodeName === "SECTION" ? node.getAttribute("aria-label") : null);
}

function attributes(old, fresh) {
  const kept = (name) => name === "open" && old.nodeName === "DETAILS"; // it is the reader's, or set by main.js
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !kept(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}
