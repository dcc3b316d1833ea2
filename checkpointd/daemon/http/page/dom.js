// Makes elements from data. Text always stays text: no part of this page parses HTML.

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

/** Change only the parts of `old` that differ from `fresh`, so that focus, selection, scrolling and opened details stay. */
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

/** Finds children with a key by the key, wherever they were before, and all others by their place. */
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

/** The key of an element: `data-key`, or the label of a section. */
function key(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return null;
  return node.getAttribute("data-key") ?? (node.nodeName === "SECTION" ? node.getAttribute("aria-label") : null);
}

function attributes(old, fresh) {
  const kept = (name) => name === "open" && old.nodeName === "DETAILS"; // the reader or main.js sets it
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !kept(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}
