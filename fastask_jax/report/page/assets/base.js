// What all parts of the page share: elements, numbers as text, data files, routes.
// Text from runs only ever enters the page as text nodes and attribute values, never as HTML.
"use strict";

const fastask = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const SVG_TAGS = new Set(["svg", "g", "rect", "line", "path", "circle", "text", "title", "polyline"]);

  // el("a.name", {href: "#/"}, child, "text"): an element.  Attributes that are null stay away;
  // functions become listeners.
  function el(what, attributes, ...children) {
    const [tag, ...classes] = what.split(".");
    const node = SVG_TAGS.has(tag) && tag !== "title"
      ? document.createElementNS(SVG, tag)
      : document.createElement(tag);
    if (classes.length) node.setAttribute("class", classes.join(" "));
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") node.addEventListener(name, value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    add(node, children);
    return node;
  }

  function add(node, children) {
    for (const child of children.flat(9)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }

  function svgTitle(text) {
    const node = document.createElementNS(SVG, "title");
    node.textContent = text;
    return node;
  }

  function fill(node, ...children) {
    node.replaceChildren();
    return add(node, children);
  }

  // -- numbers ---------------------------------------------------------------------------------

  const known = (x) => typeof x === "number" && Number.isFinite(x);
  const fixed = (digits) => (x) => (known(x) ? x.toFixed(digits).replace("-", "\u2212") : "\u2013");
  const count = (x) => (known(x) ? Math.round(x).toLocaleString("en-GB") : "\u2013");
  const percent = (x) => (known(x) ? `${(100 * x).toFixed(0)} %` : "\u2013");
  const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
  function duration(seconds) {
    if (!known(seconds)) return "\u2013";
    if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 90 ? `${minutes} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  // -- data files ------------------------------------------------------------------------------

  const arrived = new Map();
  const asked = new Map();

  function put(name, json) {
    arrived.set(name, JSON.parse(json));
  }

  // The value of a data file; loads it when it is wanted for the first time.
  function load(name) {
    if (arrived.has(name)) return Promise.resolve(arrived.get(name));
    if (!asked.has(name)) {
      asked.set(name, new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `data/${name}.js${document.documentElement.dataset.query}`;
        script.onload = () => arrived.has(name)
          ? resolve(arrived.get(name))
          : reject(new Error(`data/${name}.js holds no data`));
        script.onerror = () => {
          asked.delete(name);
          reject(new Error(`data/${name}.js is missing. If the run has gone on since this page `
            + "was opened, reload the page."));
        };
        document.head.append(script);
      }));
    }
    return asked.get(name);
  }

  // -- episodes --------------------------------------------------------------------------------

  // All episodes of all runs, as objects over the columns of their list.
  async function episodes() {
    const all = [];
    const runs = await load("runs");
    const lists = await Promise.all(runs.map((_, i) => load(`r${i}-list`)));
    lists.forEach((list, run) => {
      const { columns, texts } = list;
      const names = Object.keys(columns);
      const isText = new Set(["id", "split", "task", "type", "family", "difficulty", "outcome",
        "answer", "truth", "stop", "question"]);
      for (let i = 0; i < list.count; i++) {
        const episode = { run, place: i, index: all.length };
        for (const name of names) {
          const value = columns[name][i];
          episode[name] = isText.has(name) ? texts[value] : value;
        }
        all.push(episode);
      }
    });
    return all;
  }

  // -- routes ----------------------------------------------------------------------------------

  // "#/list?type=paid_on" -> {path: ["list"], query: URLSearchParams}
  function route() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
    return { path: path.split("/").map(unescaped), query: new URLSearchParams(query || "") };
  }

  function unescaped(part) {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  }

  function link(path, query) {
    const rest = query ? new URLSearchParams(query).toString() : "";
    return `#/${path.map(encodeURIComponent).join("/")}${rest ? `?${rest}` : ""}`;
  }

  const MARKS = { right: "\u2713", wrong: "\u2717", failed: "!", unknown: "?" };
  const mark = (outcome) => el(`span.mark.${MARKS[outcome] ? outcome : "unknown"}`,
    { title: outcome, "aria-label": outcome }, MARKS[outcome] || "?");

  return {
    el, add, fill, svgTitle, known, fixed, count, percent, plural, duration, put, load, episodes,
    route, link, mark,
  };
})();
