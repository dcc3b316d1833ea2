// The contrast of every text with what lies behind it, and of the picture's colours with their card: {text, picture}.
() => {
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ratio = (a, b) => {
    const [dark, bright] = [light(rgb(a)), light(rgb(b))].sort((x, y) => x - y);
    return (bright + 0.05) / (dark + 0.05);
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (rgb(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const drawn = (e) => e.namespaceURI.endsWith("svg");
  const ink = (e) => (drawn(e) ? getComputedStyle(e).fill : getComputedStyle(e).color);
  const hasText = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const seen = (e) => hasText(e) && e.getClientRects().length && !e.closest("script, title, noscript");
  const text = [...document.querySelectorAll("body *")].filter(seen).map((e) => [e.textContent.slice(0, 40), ratio(ink(e), behind(e))]);

  const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
  const root = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(document.createElement("i"));
  const picture = ["staging", "waiting", "persisting", "voted", "lost", "committed"].map((name) => {
    probe.style.color = root.getPropertyValue(`--${name}`);
    return [name, ratio(getComputedStyle(probe).color, card)];
  });
  return { text, picture };
}
