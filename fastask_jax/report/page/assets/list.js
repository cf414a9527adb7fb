// All episodes that a run has kept: filters, search, sorting, and only the rows that are in sight.
"use strict";

fastask.list = (() => {
  const { el, fixed, count, link, mark } = fastask;
  const FILTERS = ["run", "split", "type", "difficulty", "outcome", "stop"];
  const LABELS = { run: "run", split: "from", type: "type", difficulty: "difficulty", outcome: "outcome", stop: "ended by" };
  const EMPTY = "(none)";
  const COLUMNS = [
    { name: "outcome", label: "", title: "right or wrong" },
    { name: "step", label: "step" },
    { name: "type", label: "type" },
    { name: "difficulty", label: "difficulty", wide: true },
    { name: "question", label: "question" },
    { name: "answer", label: "answer" },
    { name: "truth", label: "truth", wide: true },
    { name: "turns", label: "turns", number: true },
    { name: "cells", label: "cells", number: true, wide: true },
    { name: "stop", label: "ended by", wide: true },
    { name: "reward", label: "reward", number: true },
  ];
  const LEVELS = { easy: 0, medium: 1, hard: 2 };

  let everything = null;  // a promise of all episodes
  let state = null;       // of the list that was shown last

  const all = () => (everything = everything || fastask.episodes());

  // What a query of the address asks for.
  function wanted(query) {
    const chosen = {};
    for (const name of FILTERS) if (query.has(name)) chosen[name] = query.get(name);
    const bound = (name, other) => {
      const value = query.get(name);
      return value === null || value === "" || !Number.isFinite(+value) ? other : +value;
    };
    return {
      chosen, text: query.get("q") || "", from: bound("from", -Infinity), to: bound("to", Infinity),
      sort: COLUMNS.some((c) => c.name === query.get("sort")) ? query.get("sort") : null,
      down: query.has("down"),
    };
  }

  function sorted(found, { sort, down }) {
    if (!sort) return [...found].sort((a, b) => b.step - a.step || a.index - b.index);  // newest first
    const value = sort === "difficulty" ? (e) => LEVELS[e.difficulty] ?? 9 : (e) => e[sort];
    const keyed = found.map((e) => [value(e), e]);
    const sign = down ? -1 : 1;
    keyed.sort(([a, x], [b, y]) => {
      if (a === b) return x.index - y.index;
      if (a === null || a === undefined) return 1;
      if (b === null || b === undefined) return -1;
      return sign * (a < b ? -1 : 1);
    });
    return keyed.map(([, e]) => e);
  }

  function matching(episodes, want) {
    const tests = Object.entries(want.chosen).map(([name, value]) => {
      const plain = value === EMPTY ? "" : value;
      return (e) => String(e[name]) === plain;
    });
    if (want.from > -Infinity || want.to < Infinity) {
      tests.push((e) => e.step >= want.from && e.step <= want.to);
    }
    for (const word of want.text.toLowerCase().split(/\s+/).filter(Boolean)) {
      tests.push((e) => `${e.question}\n${e.answer}\n${e.truth}\n${e.task}\n${e.id}`.toLowerCase().includes(word));
    }
    return sorted(tests.length ? episodes.filter((e) => tests.every((test) => test(e))) : episodes, want);
  }

  // The episodes that an address's filters leave, in its order: where j and k lead.
  async function chosen(query) {
    return matching(await all(), wanted(query));
  }

  function row(e, query, runs) {
    const cells = [
      mark(e.outcome),
      el("span.num.dim", {}, e.step),
      el("span.type", {}, e.type || "\u2013"),
      el("span.dim.wide", {}, e.difficulty),
      el("span.question", {}, e.question || e.task),
      el("span.answer", { title: e.answer }, e.answer || "\u2013"),
      el("span.dim.wide.answer", { title: e.truth }, e.truth),
      el("span.num", {}, count(e.turns)),
      el("span.num.wide", {}, count(e.cells)),
      el("span.dim.wide", {}, e.stop),
      el("span.num", {}, fixed(2)(e.reward)),
    ];
    const from = e.split === "train" ? "" : e.split;
    return el("a.row", {
      href: link(["t", e.run, e.id], query), role: "option", id: `row-${e.index}`,
      "data-type": e.type, "data-outcome": e.outcome,
    }, runs > 1 ? el(`i.swatch.${e.run ? "two" : "one"}`) : null, cells.slice(0, 4),
    el("span.about", {}, from ? el("em", {}, from) : null, cells[4]), cells.slice(5));
  }

  function replace(query) {
    history.replaceState(null, "", link(["list"], query));
  }

  async function show(main, query, alive) {
    const began = performance.now();
    const [episodes, runs] = [await all(), await fastask.load("runs")];
    if (!alive()) return null;
    const want = wanted(query);
    const body = el("div.rows", { tabindex: 0, role: "listbox", "aria-label": "episodes" });
    const spacer = el("div.spacer");
    body.append(spacer);
    const total = el("output.total", { "aria-live": "polite" });
    const empty = el("p.empty", { hidden: true }, "No episode is left by these filters.");

    let found = [], selected = 0, asked = new URLSearchParams(query), drawn = "";
    if (state && state.query === asked.toString()) ({ selected } = state);

    const height = () => (matchMedia("(max-width: 720px)").matches ? 56 : 29);

    function draw(force) {
      const high = height();
      const first = Math.max(0, Math.floor(body.scrollTop / high) - 8);
      const end = Math.min(found.length, first + 200, Math.ceil((body.scrollTop + body.clientHeight) / high) + 8);
      const key = `${first} ${end} ${high}`;
      if (force || key !== drawn) {
        drawn = key;
        spacer.style.height = `${found.length * high}px`;
        spacer.replaceChildren(...found.slice(first, end).map((e, i) => {
          const node = row(e, asked, runs.length);
          node.style.top = `${(first + i) * high}px`;
          node.style.height = `${high}px`;
          node.addEventListener("click", () => { selected = first + i; keep(); });
          return node;
        }));
      }
      head.style.paddingRight = `${14 + body.offsetWidth - body.clientWidth}px`;  // the scroll bar's
      for (const node of spacer.children) {
        const is = found[selected] && node.id === `row-${found[selected].index}`;
        node.classList.toggle("selected", is);
        node.setAttribute("aria-selected", is);
      }
      if (found[selected]) body.setAttribute("aria-activedescendant", `row-${found[selected].index}`);
    }

    const keep = () => { state = { query: asked.toString(), selected }; };

    function select(place) {
      selected = Math.max(0, Math.min(found.length - 1, place));
      const high = height();
      const [top, bottom] = [selected * high, (selected + 1) * high];
      if (top < body.scrollTop) body.scrollTop = top;
      if (bottom > body.scrollTop + body.clientHeight) body.scrollTop = bottom - body.clientHeight;
      keep();
      draw();
    }

    function update(place) {
      found = matching(episodes, want);
      const right = found.reduce((n, e) => n + (e.outcome === "right"), 0);
      fastask.fill(total, el("b", {}, count(found.length)),
        found.length === episodes.length ? " episodes" : ` of ${count(episodes.length)}`,
        found.length ? el("span.dim", {}, ` ${Math.round(100 * right / found.length)} % right`) : null);
      empty.hidden = found.length > 0;
      const entries = Object.entries(want.chosen);
      if (want.text) entries.push(["q", want.text]);
      if (want.from > -Infinity) entries.push(["from", want.from]);
      if (want.to < Infinity) entries.push(["to", want.to]);
      if (want.sort) entries.push(["sort", want.sort]);
      if (want.sort && want.down) entries.push(["down", "1"]);
      asked = new URLSearchParams(entries);
      replace(asked);
      clear.hidden = !entries.length;
      for (const node of head.children) {
        const is = node.dataset.name === want.sort;
        node.setAttribute("aria-sort", is ? (want.down ? "descending" : "ascending") : "none");
      }
      body.scrollTop = 0;
      draw(true);
      select(place);
    }

    const selects = FILTERS.filter((name) => name !== "run" || runs.length > 1).map((name) => {
      const counts = new Map();
      for (const e of episodes) counts.set(e[name], (counts.get(e[name]) || 0) + 1);
      const values = [...counts.keys()].sort((a, b) =>
        (LEVELS[a] ?? 9) - (LEVELS[b] ?? 9) || String(a).localeCompare(String(b)));
      const option = (value) => el("option", {
        value: value === "" ? EMPTY : value,
        selected: want.chosen[name] === (value === "" ? EMPTY : String(value)),
      }, name === "run" ? runs[value].name : value === "" ? EMPTY : value, ` (${count(counts.get(value))})`);
      return el("label", {}, LABELS[name], el("select", {
        name,
        change: (event) => {
          if (event.target.value) want.chosen[name] = event.target.value;
          else delete want.chosen[name];
          update(0);
        },
      }, el("option", { value: "" }, "all"), values.map(option)));
    });
    const bound = (name, label) => el("input", {
      type: "number", name, min: 0, placeholder: label, "aria-label": `steps ${label}`, value: Number.isFinite(want[name]) ? want[name] : null,
      input: (event) => {
        const value = event.target.value;
        want[name] = value === "" ? (name === "from" ? -Infinity : Infinity) : +value;
        update(0);
      },
    });
    const search = el("input", {
      type: "search", name: "q", title: "in question, answer, truth and task", value: want.text, placeholder: "search  ( / )",
      "aria-label": "search in question, answer, truth and task", input: (event) => { want.text = event.target.value; update(0); },
    });
    const clear = el("a.button", { href: "#/list" }, "clear");
    const head = el("div.head", { class: `head${runs.length > 1 ? " two-runs" : ""}` }, COLUMNS.map((column) => el("button", {
      type: "button", "data-name": column.name, title: column.title || `sort by ${column.label}`,
      class: [column.number && "num", column.wide && "wide"].filter(Boolean).join(" ") || null,
      click: () => {
        if (want.sort !== column.name) Object.assign(want, { sort: column.name, down: !!column.number });
        else if (want.down === !!column.number) want.down = !want.down;
        else want.sort = null;
        update(0);
      },
    }, column.label || "\u2713")));

    fastask.fill(main,
      el("form.filters", { submit: (event) => event.preventDefault() },
        selects, el("label.step", {}, "steps", el("span", {}, bound("from", "from"), bound("to", "to"))), el("label.search", {}, search), clear, total),
      el("section.list", { class: `list${runs.length > 1 ? " two-runs" : ""}` }, head, body, empty));
    body.addEventListener("scroll", () => draw());
    new ResizeObserver(() => { if (body.isConnected) draw(); }).observe(body);
    update(selected);
    body.focus({ preventScroll: true });
    main.dataset.listed = Math.round(performance.now() - began);

    return (event) => {
      const typing = event.target.matches("input, select");
      if (typing) {
        if (event.key === "Escape") { event.target.blur(); body.focus(); return true; }
        if (event.key !== "Enter" || event.target.matches("select")) return false;
      }
      const page = Math.max(1, Math.floor(body.clientHeight / height()) - 1);
      const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
      if (event.key in moves) select(selected + moves[event.key]);
      else if (event.key === "Enter" && found[selected]) location.hash = link(["t", found[selected].run, found[selected].id], asked);
      else if (event.key === "/") search.focus();
      else if (event.key === "Escape") location.hash = "#/";
      else return false;
      return true;
    };
  }

  // Tells the list which of its rows was looked at last.
  function seen(query, place) {
    state = { query: new URLSearchParams(query).toString(), selected: place };
  }

  return { show, chosen, all, seen };
})();
