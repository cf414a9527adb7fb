// Which view is shown, and where keys go.
"use strict";

(() => {
  const { el, fill, link, route } = fastask;
  const top = document.getElementById("top");
  const main = document.getElementById("main");
  let keys = null;
  let turn = 0;

  const VIEWS = {
    "": (path, query, alive) => fastask.overview.show(main, alive),
    list: (path, query, alive) => fastask.list.show(main, query, alive),
    t: (path, query, alive) => fastask.trajectory.show(main, path, query, alive),
    settings: (path, query, alive) => settings(alive),
  };

  async function settings(alive) {
    const runs = await fastask.load("runs");
    if (!alive()) return;
    fill(main, runs.map((run) => el("section.panel", {}, el("h2", {}, run.name, el("small.key", {}, run.path)),
      el("pre.settings", {}, JSON.stringify(run.config, null, 2)))));
  }

  async function bar(view) {
    const runs = await fastask.load("runs");
    const tab = (name, label) => el("a", { href: link(name ? [name] : []), "aria-current": name === view ? "page" : null }, label);
    fill(top,
      el("h1", {}, runs.map((run, i) => el(`span${runs.length > 1 ? (i ? ".two" : ".one") : ""}`, { title: run.path },
        runs.length > 1 ? el("i.swatch") : null, run.name))),
      el("nav", {}, tab("", "Overview"), tab("list", "Episodes"), tab("settings", "Settings")),
      el("p.hint", {}, { list: "j k move \u00b7 Enter opens \u00b7 / searches \u00b7 Esc leaves",
        t: "j k next, previous \u00b7 r raw text \u00b7 Esc back" }[view] || ""));
  }

  async function show() {
    const mine = ++turn;
    const { path, query } = route();
    const view = Object.hasOwn(VIEWS, path[0]) ? path[0] : "";
    delete main.dataset.shown;
    keys = null;
    // The layout stays the old view's until the new one has its data and draws.
    const dress = () => { document.body.dataset.view = view || "overview"; };
    const alive = () => {
      if (mine === turn) dress();
      return mine === turn;
    };
    try {
      await bar(view === "t" ? "t" : view);
      // A view that had to wait for data draws nothing once another has been asked for.
      const found = await VIEWS[view](path, query, alive);
      if (mine !== turn) return;
      keys = found;
      if (view !== "list") window.scrollTo(0, 0);
    } catch (error) {
      if (mine !== turn) return;
      dress();
      fill(main, el("p.empty.failed", { role: "alert" }, error.message));
    }
  }

  window.addEventListener("hashchange", show);
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys) return;
    if (keys(event)) event.preventDefault();
  });
  show();
})();
