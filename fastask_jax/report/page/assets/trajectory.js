// One episode: the conversation with its tokens shaded, beside the map of its workbook and its reward.
"use strict";

fastask.trajectory = (() => {
  const { el, known, fixed, count, duration, plural, link, mark } = fastask;
  const LONG = 6000, SHOWN = 2500;
  const OPEN = /^\n?<\|im_start\|>(?:user|tool)\n/, CLOSE = /<\|im_end\|>\n<\|im_start\|>assistant\n(?:<think>\s*<\/think>\s*)?$/;
  const SURPRISE = 5;  // nats at which the shading is full

  let raw = false;

  // Text that may be huge: a part of it, and a button for the rest.
  function long(text, draw) {
    if (text.length <= LONG) return draw(text);
    const box = el("span", {}, draw(text.slice(0, SHOWN)));
    box.append(el("button.more", {
      type: "button",
      click: () => fastask.fill(box, draw(text)),
    }, `\u2026 show all ${count(text.length)} characters`));
    return box;
  }

  // What the model said, a span a token, darker the less likely it was.
  function tokens(turn) {
    if (!turn.chars) return long(turn.text, (text) => el("span", {}, text));
    const points = Array.from(turn.text);
    const draw = (limit) => {
      const out = el("span.tokens");
      let at = 0;
      for (let i = 0; i < turn.chars.length && at < limit; i++) {
        const piece = points.slice(at, at + turn.chars[i]).join("");
        at += turn.chars[i];
        if (!piece) continue;
        const surprise = Math.min(1, Math.max(0, -turn.logprobs[i]) / SURPRISE);
        const node = el("span.t", {
          title: `p = ${(100 * Math.exp(turn.logprobs[i])).toPrecision(3)} %, logprob ${fixed(2)(turn.logprobs[i])}`,
        }, piece);
        if (/^<\|.*\|>$/.test(piece)) node.classList.add("special");
        if (surprise > 0.02) node.style.setProperty("--s", surprise.toFixed(2));
        out.append(node);
      }
      return out;
    };
    if (points.length <= LONG) return draw(Infinity);
    const box = el("span", {}, draw(SHOWN));
    box.append(el("button.more", { type: "button", click: () => fastask.fill(box, draw(Infinity)) },
      `\u2026 show all ${count(points.length)} characters`));
    return box;
  }

  // Prompt and tool results without the template's own marks; `raw` shows them as the model saw them.
  function pieces(turn) {
    if (raw) return [[turn.role, turn.text]];
    if (turn.role === "observation") {
      return [["tools", turn.text.replace(OPEN, "").replace(CLOSE, "")]];
    }
    const body = turn.text.replace(CLOSE, "<|im_end|>");
    const found = [...body.matchAll(/<\|im_start\|>(\w+)\n([\s\S]*?)<\|im_end\|>/g)];
    const covered = found.reduce((n, m) => n + m[0].length + 1, 0);
    if (!found.length || covered < body.length) return [["prompt", turn.text]];
    return found.map((m) => [m[1], m[2]]);
  }

  function observed(text) {
    const out = el("span");
    for (const line of text.split(/(?<=\n)/)) {
      if (/^<\/?tool_response>\s*$/.test(line)) out.append(el("span.tag", {}, line));
      else if (/^error:|^\w*Error\b/.test(line)) out.append(el("span.fault", {}, line));
      else out.append(line);
    }
    return out;
  }

  function conversation(detail, root) {
    const box = el("section.conversation");
    let turn = 0;
    for (const said of detail.turns) {
      if (said.role !== "reply") {
        for (const [i, [who, text]] of pieces(said).entries()) {
          box.append(el(`article.said.${said.role}`, {},
            el("header", {}, el("b", {}, who), el("span.dim", {}, said.tokens && !i ? `${plural(said.tokens, "token")}${said.role === "prompt" ? " of prompt" : ""}` : "")),
            el("pre", {}, long(text, observed))));
        }
        continue;
      }
      turn += 1;
      const own = turn;
      const reads = detail.reads.filter((r) => r.turn === own);
      const mean = said.tokens ? said.logprob / said.tokens : null;
      const light = (on) => () => fastask.map.highlight(root, on ? own : null);
      box.append(el("article.said.reply", {
        id: `turn-${own}`, "data-turn": own,
        mouseenter: reads.length ? light(true) : null, mouseleave: reads.length ? light(false) : null,
      },
      el("header", {}, el("b", {}, `turn ${own}`),
        el("span.dim", { title: "mean logprob of its tokens" }, plural(said.tokens, "token"), known(mean) ? `, ${fixed(2)(mean)} nats each` : ""),
        said.versions.length ? el("span.dim", { title: "updates that the weights had had" }, `weights ${said.versions.join(", ")}`) : null),
      el("pre", {}, tokens(said)),
      reads.length ? el("footer", {}, "read ", reads.map((r) => el("span.range", {}, r.range))) : null));
    }
    if (!detail.turns.length) {
      box.append(el("p.empty", {}, "Only the result of this episode was kept, not its transcript: ",
        "traces.jsonl holds as many as loop.traces and loop.eval_traces say."));
    }
    if (detail.error !== null) box.append(el("article.said.failed", {}, el("header", {}, el("b", {}, "failed")), el("pre", {}, long(detail.error, (t) => t))));
    return box;
  }

  function reward(detail, weights, right, inGroup) {
    const known_ = weights.parts || {};
    const rows = Object.entries(detail.parts);
    const paid = (name) => name === "correct" || !weights.gated || right;
    const share = (name, value) => (known(known_[name]) && known(value) ? (paid(name) ? known_[name] * value : 0) : null);
    const total = rows.reduce((sum, [name, value]) => sum + (share(name, value) || 0), 0);
    const most = Math.max(detail.reward || 0, Object.values(known_).reduce((a, b) => a + Math.max(0, b), 0), 1e-9);
    const bar = el("div.reward-bar", { "aria-hidden": true });
    const body = el("tbody");
    for (const [name, value] of rows) {
      const part = share(name, value);
      if (part > 0) {
        const piece = el(`i.part-${name.replace(/[^a-z]/gi, "")}`);
        piece.style.width = `${(100 * part) / most}%`;
        bar.append(piece);
      }
      body.append(el("tr", { "data-part": name, class: paid(name) ? null : "unpaid" },
        el("th", { scope: "row" }, el(`i.key.part-${name.replace(/[^a-z]/gi, "")}`), name),
        el("td.num", {}, fixed(3)(value)), el("td.num.dim", {}, known(known_[name]) ? `\u00d7 ${known_[name]}` : ""),
        el("td.num", {}, part === null ? "" : fixed(3)(part))));
    }
    const differs = rows.length && Object.keys(known_).length && known(detail.reward) && Math.abs(total - detail.reward) > 1e-6;
    return el("section.reward", {}, el("h2", {}, "Reward"), bar,
      el("table", {}, body, el("tfoot", {}, el("tr.total", {},
        el("th", { scope: "row" }, "reward"), el("td", {}), el("td", {}), el("td.num", {}, fixed(3)(detail.reward))))),
      differs ? el("p.dim", {}, `The parts with today's weights make ${fixed(3)(total)}.`) : null,
      weights.gated && !right ? el("p.dim", {}, "Efficiency and concise are paid for right answers alone.") : null,
      known(detail.advantage) && detail.turns.length && inGroup ? el("p.dim", {}, "advantage within its group ",
        el("b", {}, `${detail.advantage > 0 ? "+" : ""}${fixed(3)(detail.advantage)}`)) : null);
  }

  // Other episodes on the same task: of the same group, of other evaluations, of the other run.
  function relatives(e, everyone, runs) {
    const same = everyone.filter((o) => o.task && o.task === e.task && o !== e);
    if (!same.length) return null;
    const named = (o) => [runs.length > 1 ? runs[o.run].name : null, o.split === "train" ? `copy ${o.sample}` : o.split,
      o.split === "train" || o.split === "eval" ? `step ${o.step}` : null].filter(Boolean).join(", ");
    return el("section.relatives", {}, el("h2", {}, "The same task"),
      el("ul", {}, same.slice(0, 24).map((o) => el("li", {}, el("a", { href: link(["t", o.run, o.id]) },
        runs.length > 1 ? el(`i.swatch.${o.run ? "two" : "one"}`) : null, mark(o.outcome), el("span.grow", {}, named(o)),
        el("span.answer", { title: o.answer }, o.answer || "\u2013"), el("span.num", {}, fixed(2)(o.reward)))))),
      same.length > 24 ? el("p.dim", {}, `and ${count(same.length - 24)} more`) : null);
  }

  async function show(main, path, query, alive) {
    const [everyone, runs] = [await fastask.list.all(), await fastask.load("runs")];
    const run = Number(path[1]);
    const e = everyone.find((o) => o.run === run && o.id === path[2]);
    if (!e) {
      if (!alive()) return null;
      fastask.fill(main, el("p.empty", {}, "This run keeps no episode of that name. ", el("a", { href: "#/list" }, "All episodes")));
      return null;
    }
    const among = await fastask.list.chosen(query);
    const place = among.indexOf(e);
    const chunk = runs[run].chunks.findIndex(([first, end]) => first <= e.place && e.place < end);
    const details = await fastask.load(`r${run}-${chunk}`);
    if (!alive()) return null;
    const detail = details[e.place - runs[run].chunks[chunk][0]];
    const go = (step) => among[place + step] && link(["t", among[place + step].run, among[place + step].id], query);
    const back = link(["list"], query);
    if (place >= 0) fastask.list.seen(query, place);

    function draw() {
      const side = el("aside", {});
      const tags = [e.type, e.difficulty, e.split === "train" ? null : e.split, `step ${e.step}`,
        known(e.turns) ? plural(e.turns, "turn") : null, known(detail.cells) ? plural(detail.cells, "cell") : null,
        detail.malformed ? plural(detail.malformed, "malformed call") : null,
        detail.python[0] ? `${plural(detail.python[0], "Python run")}${detail.python[1] ? ` (${detail.python[1]} failed)` : ""}` : null,
        known(detail.seconds) ? duration(detail.seconds) : null, e.stop ? `ended by ${e.stop}` : null];
      fastask.add(side, [
        el("section.workbook", {}, el("h2", {}, "Workbook",
          el("small.key", {}, el("span", {}, el("i.k-used"), "used"), el("span", {}, el("i.k-lit"), "read"))),
        fastask.map.map(detail),
        detail.outline === "rebuilt" ? el("p.dim", {}, "Sheets as today's generator makes them: the run didn't record them.") : null),
        reward(detail, runs[run].weights, e.outcome === "right", e.split === "train"),
        relatives(e, everyone, runs),
      ]);
      fastask.fill(main,
        el("nav.where", {},
          el("a.button", { href: back, title: "Esc" }, "\u2190 list"),
          el("span.dim", {}, place < 0 ? "" : `${count(place + 1)} of ${count(among.length)}`),
          go(-1) ? el("a.button", { href: go(-1), title: "k" }, "previous") : el("span.button.off", {}, "previous"),
          go(1) ? el("a.button", { href: go(1), title: "j" }, "next") : el("span.button.off", {}, "next"),
          el("label.button", {}, el("input", {
            type: "checkbox", checked: raw, change: (event) => { raw = event.target.checked; draw(); },
          }), "raw")),
        el("div.title", { class: `title ${e.outcome}` },
          el("h1", {}, mark(e.outcome), detail.question || detail.task || "no question recorded"),
          el("p.result", {}, el("span", {}, "answered ", detail.answer === null ? el("b.none", {}, "nothing") : el("b", {}, detail.answer)),
            detail.truth === null ? null : el("span", {}, "truth ", el("b", {}, detail.truth))),
          el("p.tags", {}, runs.length > 1 ? el(`span.${run ? "two" : "one"}`, {}, el("i.swatch"), runs[run].name) : null,
            tags.filter(Boolean).map((tag) => el("span", {}, tag)))),
        el("div.columns", {}, el("div.left", {}, el("h2", {}, "Conversation",
          el("small.key", {}, "tokens shaded by how unlikely they were", el("i.ramp"), "0 to 5 nats")),
        conversation(detail, side)), side));
      main.dataset.shown = `${run}/${e.id}`;
    }

    draw();
    return (event) => {
      if (event.target.matches("input, select")) event.target.blur();
      const target = { j: go(1), ArrowRight: go(1), k: go(-1), ArrowLeft: go(-1), Escape: back }[event.key];
      if (target) location.hash = target;
      else if (event.key === "r") { raw = !raw; draw(); }
      else return false;
      return true;
    };
  }

  return { show };
})();
