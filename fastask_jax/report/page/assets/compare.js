// Two runs, or two policies of them, in one table: exact match with intervals, and their difference.
"use strict";

fastask.compare = (() => {
  const { el, known, count } = fastask;

  // R. G. Newcombe's interval for a difference of two shares (Statistics in Medicine 1998, method
  // 10), out of their Wilson intervals.
  function difference(a, b) {
    const d = b.exact_match - a.exact_match;
    const low = d - Math.hypot(b.exact_match - b.low, a.high - a.exact_match);
    const high = d + Math.hypot(b.high - b.exact_match, a.exact_match - a.low);
    return { d, low, high, noise: low <= 0 && high >= 0 };
  }

  const points = (x) => (known(x) ? (Math.abs(x) < 0.005 ? "0" : `${x < 0 ? "\u2212" : "+"}${Math.abs(100 * x).toFixed(0)}`) : "\u2013");

  function cell(a, b) {
    if (!a || !b) return el("td.num", {}, "\u2013");
    const { d, low, high, noise } = difference(a, b);
    const verdict = noise ? "noise" : d > 0 ? "better" : "worse";
    return el(`td.num.difference.${verdict}`, {
      title: noise ? "the 95 % interval of the difference holds 0" : `the difference is beyond the noise (95 %)`,
    }, el("b", {}, points(d)), el("small", {}, ` ${points(low)} to ${points(high)}`));
  }

  function table(runs) {
    const all = runs.map((run) => run.accuracy);
    if (all.some((list) => !list.length)) {
      return el("p.empty", {}, "One of the runs has no evaluation yet, so there is nothing to compare.");
    }
    const chosen = all.map((list) => {
      const steps = list.filter((a) => a.step !== null);
      return steps[steps.length - 1] || list.find((a) => a.label === "trained") || list[0];
    });
    const box = el("div.scroll");
    const pick = (i) => el("select", {
      "aria-label": `policy of ${runs[i].name}`,
      change: (event) => { chosen[i] = all[i][event.target.selectedIndex]; draw(); },
    }, all[i].map((a) => el("option", { selected: a === chosen[i] }, a.label)));

    function draw() {
      const { rows, bar } = fastask.overview;
      const body = el("tbody", {});
      let head = null;
      for (const row of rows(chosen)) {
        if (row.head && row.head !== head) {
          head = row.head;
          body.append(el("tr.section", {}, el("th", { colspan: 5, scope: "rowgroup" }, head)));
        }
        const [a, b] = chosen.map(row.get);
        const filter = row.filter ? fastask.link(["list"], [row.filter, ["split", "eval"]]) : null;
        body.append(el(row.total ? "tr.total" : "tr", { "data-row": row.label },
          el("th", { scope: "row" }, filter ? el("a", { href: filter }, row.label) : row.label),
          el("td.num.dim", {}, count(Math.max(a?.tasks || 0, b?.tasks || 0))),
          el("td", {}, bar(a, "one")), el("td", {}, bar(b, "two")), cell(a, b)));
      }
      fastask.fill(box, el("table.accuracy.compare", {},
        el("thead", {}, el("tr", {}, el("th", {}), el("th.num", {}, "tasks"),
          el("th.one", { scope: "col" }, el("i.swatch"), runs[0].name, " ", pick(0)),
          el("th.two", { scope: "col" }, el("i.swatch"), runs[1].name, " ", pick(1)),
          el("th.num", { scope: "col" }, "difference"))),
        body));
    }

    draw();
    return el("section.panel", { id: "compare" },
      el("h2", {}, "Side by side",
        el("small.key", {}, "exact match with 95 % intervals; a difference in points is grey where its interval holds 0")),
      box);
  }

  return { table, difference };
})();
