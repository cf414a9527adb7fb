// The first view: curves of one run, or of two over each other, and accuracy by type.
"use strict";

fastask.overview = (() => {
  const { el, known, fixed, percent, count, duration, link } = fastask;
  const COLOURS = ["one", "two"];
  const PARTS = {
    learner: [["u-learn", "learns", "time/learn"], ["u-eval", "evaluates", "time/eval"],
      ["u-idle", "waits for rollouts", "time/rollout"]],
    engine: [["u-learn", "decodes", "time/decode"], ["u-read", "reads prompts and results", "time/append"],
      ["u-wait", "waits for tools", "time/pool"], ["u-idle", "has nothing to do", "time/idle"]],
  };

  function points(run, name, low, high) {
    const values = run.series[name];
    if (!values) return [];
    const bound = (list, i) => (list && run.series[list] ? run.series[list][i] : null);
    return run.steps
      .map((step, i) => [step, values[i], bound(low, i), bound(high, i)])
      .filter((p) => known(p[1]))
      .map((p) => (known(p[2]) ? p : p.slice(0, 2)));
  }

  // The training's line and the evaluations' dots of each run.
  function both(runs, train, evaluated, low, high) {
    return runs.flatMap((run, i) => [
      { label: `${run.name}, training`, colour: COLOURS[i], points: points(run, train) },
      { label: `${run.name}, evaluation`, colour: COLOURS[i], dots: true,
        points: evaluated ? points(run, evaluated, low, high) : [] },
    ]);
  }

  function charts(runs) {
    const { lines, shares } = fastask.charts;
    const time = runs.flatMap((run) => Object.entries(PARTS).map(([who, parts]) => {
      const at = (run.series["time/rollout"] || []).flatMap((v, i) => (known(v) ? [i] : []));
      const values = (name) => at.map((i) => (run.series[name] ? run.series[name][i] : 0));
      return shares(`Time of the ${who}${runs.length > 1 ? `, ${run.name}` : ""}`, at.map((i) => run.steps[i]),
        parts.map(([colour, label, series]) => [colour, label, values(series)]));
    }));
    return [
      lines("Reward", both(runs, "train/reward", "eval/mean_reward"), { low: 0 }),
      lines("Accuracy", both(runs, "train/accuracy", "eval/exact_match", "eval/low", "eval/high"),
        { low: 0, high: 1, format: percent }),
      lines("Turns", both(runs, "train/turns", "eval/turns"), { low: 0 }),
      lines("Cells read", both(runs, "train/cells", "eval/cells"), { low: 0 }),
      ...time,
      lines("Staleness, updates", both(runs, "policy/staleness"), { low: 0 }),
      lines("Entropy, nats a token", both(runs, "policy/entropy"), { low: 0 }),
      lines("Rollouts with signal", both(runs, "train/with_signal"), { low: 0, high: 1, format: percent }),
      lines("Malformed calls", both(runs, "train/malformed_calls"), { low: 0 }),
      lines("Sampler\u2013learner gap, nats", both(runs, "policy/log_ratio_abs"), { low: 0 }),
      lines("Tokens a second", both(runs, "train/tokens_per_second"), { low: 0 }),
    ];
  }

  // The policies whose accuracies are shown beside each other: [{policy, run, label}]
  function policies(runs) {
    return runs.flatMap((run, i) => {
      const steps = run.accuracy.filter((a) => a.step !== null);
      const named = run.accuracy.filter((a) => a.step === null);
      const chosen = [...new Set([steps[0], steps[steps.length - 1]])].filter(Boolean);
      const order = ["blind", "base", "trained", "oracle"];
      const rank = (a) => {
        const place = order.indexOf(a.step === null || a.step === 0 ? a.label : "trained");
        return place < 0 ? order.length : place;
      };
      return [...chosen, ...named].sort((a, b) => rank(a) - rank(b))
        .map((policy) => ({ policy, run: i, label: policy.step ? `trained, ${policy.label}` : policy.label }));
    });
  }

  const whole = (a) => `${percent(a.exact_match)}, 95 % interval ${percent(a.low)} to ${percent(a.high)}, ${a.tasks} tasks`;

  // A share with its interval, drawn and written.
  function bar(found, colour) {
    if (!found) return el("span.bar.none", {}, "\u2013");
    const at = (v) => `${(100 * v).toFixed(2)}%`;
    const range = el("i.interval"), dot = el("i.dot");
    range.style.left = at(found.low);
    range.style.width = at(found.high - found.low);
    dot.style.left = at(found.exact_match);
    return el(`span.bar.${colour}`, { title: whole(found) },
      el("span.track", {}, range, dot), el("span.value", {}, percent(found.exact_match)));
  }

  const LEVELS = { easy: 0, medium: 1, hard: 2 };

  // Rows of the table of accuracies: [label, key of the filter, value]
  function rows(accuracies) {
    const family = {};
    accuracies.forEach((a) => Object.assign(family, a.families));
    const types = [...new Set(accuracies.flatMap((a) => Object.keys(a.by_type)))]
      .sort((a, b) => `${family[a]} ${a}`.localeCompare(`${family[b]} ${b}`));
    const levels = [...new Set(accuracies.flatMap((a) => Object.keys(a.by_difficulty)))]
      .sort((a, b) => (LEVELS[a] ?? 9) - (LEVELS[b] ?? 9));
    return [
      { label: "all tasks", total: true, get: (a) => a.all },
      ...levels.map((v) => ({ label: v, head: "difficulty", filter: ["difficulty", v], get: (a) => a.by_difficulty[v] })),
      ...types.map((v) => ({ label: v, head: family[v], filter: ["type", v], get: (a) => a.by_type[v] })),
    ];
  }

  function accuracy(runs) {
    const shown = policies(runs);
    if (!shown.length) return el("p.empty", {}, "No evaluation yet.");
    const steps = shown.filter((s) => s.policy.step !== null);
    const last = steps[steps.length - 1] || null;
    const trained = last || shown.find((s) => s.label === "trained");
    const only = last ? [["split", "eval"], ["from", last.policy.step], ["to", last.policy.step]] : [];
    const found = rows(shown.map((s) => s.policy));
    const body = el("tbody", {});
    let head = null;
    for (const row of found) {
      if (row.head && row.head !== head) {
        head = row.head;
        body.append(el("tr.section", {}, el("th", { colspan: shown.length + 2, scope: "rowgroup" }, head)));
      }
      const tasks = Math.max(...shown.map((s) => row.get(s.policy)?.tasks || 0));
      const label = row.filter ? el("a", { href: link(["list"], [row.filter, ...only]) }, row.label) : row.label;
      body.append(el(row.total ? "tr.total" : "tr", {},
        el("th", { scope: "row" }, label), el("td.num.dim", {}, count(tasks)),
        shown.map((s) => el("td", {}, bar(row.get(s.policy), s === trained ? "one" : "other")))));
    }
    return el("table.accuracy", {},
      el("thead", {}, el("tr", {}, el("th", {}), el("th.num", {}, "tasks"),
        shown.map((s) => el("th", { scope: "col" }, s.label,
          el("small", {}, `reward ${fixed(2)(s.policy.mean_reward)}, ${fixed(1)(s.policy.turns)} turns, ${count(s.policy.cells)} cells`))))),
      body);
  }

  function facts(run, i, runs, episodes) {
    const last = run.accuracy.filter((a) => a.step !== null).pop();
    const wall = run.series["time/wall"];
    const config = run.config;
    const settings = [config.model, config.mode, config.tasks && `${config.tasks.scale} workbooks`,
      config.loop && `batch ${config.loop.batch_size} in groups of ${config.loop.group_size}`];
    const item = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    return el("section.facts", {},
      el("dl", {},
        runs.length > 1 ? item("run", el(`span.${COLOURS[i]}`, {}, el("i.swatch"), run.name)) : null,
        item("exact match", last ? el("span", { title: whole(last.all) }, percent(last.all.exact_match),
          el("small", {}, ` ${(100 * last.all.low).toFixed(0)}\u2013${(100 * last.all.high).toFixed(0)}`)) : "\u2013"),
        item("updates", count(Math.max(0, ...run.steps))),
        item("time", wall ? duration(wall[wall.length - 1]) : "\u2013"),
        item("episodes kept", el("a", { href: link(["list"], runs.length > 1 ? [["run", i]] : []) }, count(episodes))),
        item("settings", settings.filter(Boolean).join(" \u00b7 ") || "\u2013")));
  }

  async function show(main, alive) {
    const runs = await fastask.load("runs");
    if (!alive()) return;
    fastask.fill(main,
      el("div.allfacts", {}, runs.map((run, i) => facts(run, i, runs, run.episodes))),
      runs.some((run) => run.steps.length) ? [
        el("h2", {}, "Over the updates",
          el("small.key", {}, "\u2014 training", el("span", {}, "\u25cb evaluation, with its 95 % interval"))),
        el("section.charts", {}, charts(runs))] : null,
      runs.length > 1 ? fastask.compare.table(runs) : null,
      runs.map((run) => (runs.length > 1
        ? el("details.panel", {}, el("summary", {}, `Exact match on held-out tasks, all policies of ${run.name}`),
          el("div.scroll", {}, accuracy([run])))
        : el("section.panel", {}, el("h2", {}, "Exact match on held-out tasks"), el("div.scroll", {}, accuracy([run]))))),
    );
  }

  return { show, rows, bar, policies };
})();
