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
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, at) => (at < before.length ? morph(before[at], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}

function key(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}

function attributes(old, fresh) {
  const kept = (name) => name === "open" && old.nodeName === "DETAILS"; // it is the reader's
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !kept(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}
