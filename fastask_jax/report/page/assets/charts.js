// Small line charts over the updates of a run, and stacked shares of time.
"use strict";

fastask.charts = (() => {
  const { el, svgTitle, known } = fastask;
  const W = 320, H = 168, LEFT = 38, RIGHT = 8, TOP = 8, BOTTOM = 22;

  // Round values from low to high, three to six of them.
  function ticks(low, high) {
    const raw = (high - low) / 4 || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) {
      out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
    }
    return out;
  }

  function short(x) {
    if (!known(x)) return "\u2013";
    const size = Math.abs(x);
    if (size > 0 && size < 1e-3) return x.toExponential(0).replace("e-", "e\u2212");
    if (size >= 10000) return `${+(x / 1000).toPrecision(3)}k`;
    return String(size >= 100 ? Math.round(x) : +x.toPrecision(size < 1 ? 2 : 3)).replace("-", "\u2212");
  }

  function smooth(points) {
    const half = Math.floor(points.length / 24);
    return points.map(([x], i) => {
      const near = points.slice(Math.max(0, i - half), i + half + 1);
      return [x, near.reduce((sum, p) => sum + p[1], 0) / near.length];
    });
  }

  const path = (points, x, y) => points.map(([a, b], i) =>
    `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

  // series: [{label, colour, points: [[x, y, low, high]], dots}]
  // options: {low, high: bounds that are always shown, format, note}
  function lines(title, series, options = {}) {
    const shown = series.filter((s) => s.points.length);
    const format = options.format || short;
    const head = el("figcaption", {}, el("b", {}, title), el("span.now", {}));
    if (!shown.length) {
      return el("figure.chart.none", {}, head, el("p", {}, options.none || "not recorded"));
    }
    const all = shown.flatMap((s) => s.points);
    const xs = all.map((p) => p[0]);
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    const ys = all.flatMap((p) => p.slice(1).filter(known));
    let low = Math.min(...ys, options.low ?? Infinity);
    let high = Math.max(...ys, options.high ?? -Infinity);
    if (high === low) [low, high] = [low - (low ? Math.abs(low) * 0.1 : 0), high + (Math.abs(high) * 0.1 || 1)];
    const span = high - low;
    if (options.low === undefined) low -= span * 0.06;
    if (options.high === undefined) high += span * 0.06;
    const x = (v) => LEFT + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (W - LEFT - RIGHT);
    const y = (v) => H - BOTTOM - ((v - low) / (high - low)) * (H - BOTTOM - TOP);
    const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
    for (const v of ticks(low, high)) {
      svg.append(
        el("line.grid", { x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v) }),
        el("text.tick", { x: LEFT - 5, y: y(v) + 3.5, "text-anchor": "end" }, format(v)),
      );
    }
    for (const v of ticks(x0, x1).filter(Number.isInteger)) {
      svg.append(el("text.tick", { x: x(v), y: H - 7, "text-anchor": "middle" }, v));
    }
    for (const s of shown) {
      const points = s.points.filter((p) => known(p[1]));
      if (s.dots) {
        for (const [a, b, lo, hi] of points) {
          if (known(lo)) {
            svg.append(el(`line.whisker.${s.colour}`, { x1: x(a), x2: x(a), y1: y(lo), y2: y(hi) }));
          }
          svg.append(el(`circle.dot.${s.colour}`, { cx: x(a), cy: y(b), r: 3 }));
        }
        continue;
      }
      if (points.length > 24) svg.append(el(`path.raw.${s.colour}`, { d: path(points, x, y) }));
      if (points.length === 1) {
        svg.append(el(`circle.point.${s.colour}`, { cx: x(points[0][0]), cy: y(points[0][1]), r: 2 }));
      }
      svg.append(el(`path.line.${s.colour}`, { d: path(smooth(points), x, y) }));
    }
    const cursor = el("line.cursor", { y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
    svg.append(cursor);
    const now = head.querySelector(".now");
    const values = (step) => shown.map((s) => {
      const point = s.points.find((p) => p[0] === step);
      return point && known(point[1])
        ? el(`span.${s.colour}`, { title: s.label }, s.dots ? "\u25cb " : "", format(point[1])) : null;
    });
    const rest = () => {
      cursor.setAttribute("visibility", "hidden");
      const last = shown.map((s) => {
        const point = s.points[s.points.length - 1];
        return el(`span.${s.colour}`, { title: `${s.label}, step ${point[0]}` },
          s.dots ? "\u25cb " : "", format(point[1]));
      });
      fastask.fill(now, last);
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * W;
      const step = xs.reduce((best, v) => (Math.abs(x(v) - at) < Math.abs(x(best) - at) ? v : best));
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      cursor.setAttribute("visibility", "visible");
      fastask.fill(now, el("span.dim", {}, `step ${step}`), values(step));
    });
    svg.addEventListener("pointerleave", rest);
    rest();
    return el("figure.chart", {}, head, svg);
  }

  // parts: [[class, label, values by step]]; each step's values are scaled to their sum.
  function shares(title, steps, parts) {
    const head = el("figcaption", {}, el("b", {}, title));
    if (!steps.length) return el("figure.chart.none", {}, head, el("p", {}, "not recorded"));
    const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
    const wide = (W - LEFT - RIGHT) / steps.length;
    const y = (v) => H - BOTTOM - v * (H - BOTTOM - TOP);
    for (const v of [0, 0.5, 1]) {
      svg.append(el("text.tick", { x: LEFT - 5, y: y(v) + 3.5, "text-anchor": "end" }, `${100 * v} %`));
    }
    const means = parts.map(() => 0);
    steps.forEach((step, i) => {
      const sum = parts.reduce((total, [, , values]) => total + (values[i] || 0), 0) || 1;
      let base = 0;
      parts.forEach(([name, label, values], k) => {
        const share = (values[i] || 0) / sum;
        means[k] += share / steps.length;
        const rect = el(`rect.${name}`, {
          x: LEFT + i * wide, width: Math.max(0.3, wide - (wide > 6 ? 1 : 0)),
          y: y(base + share), height: Math.max(0, y(base) - y(base + share)),
        });
        rect.append(svgTitle(`step ${step}: ${label} ${(100 * share).toFixed(0)} %`));
        svg.append(rect);
        base += share;
      });
    });
    const every = Math.ceil(steps.length / 6);
    steps.forEach((step, i) => {
      if (i % every === 0) {
        svg.append(el("text.tick", { x: LEFT + (i + 0.5) * wide, y: H - 7, "text-anchor": "middle" }, step));
      }
    });
    const key = el("p.key", {}, parts.map(([name, label], k) =>
      el("span", {}, el(`i.${name}`), `${label} ${(100 * means[k]).toFixed(0)} %`)));
    return el("figure.chart", {}, head, svg, key);
  }

  return { lines, shares };
})();
