// A small map of a workbook: a panel a sheet, its used range outlined, the cells that were read lit.
"use strict";

fastask.map = (() => {
  const { el, svgTitle, count } = fastask;
  const WIDE = 132, HIGH = 62;

  // How many cells lie in at least one of the areas, [top, left, bottom, right] each.
  function union(areas) {
    const edges = (low, high) => [...new Set(areas.flatMap((a) => [a[low], a[high] + 1]))].sort((a, b) => a - b);
    const rows = edges(0, 2), columns = edges(1, 3);
    let cells = 0;
    for (let i = 0; i + 1 < rows.length; i++) {
      for (let k = 0; k + 1 < columns.length; k++) {
        if (areas.some((a) => a[0] <= rows[i] && rows[i] < a[2] + 1 && a[1] <= columns[k] && columns[k] < a[3] + 1)) {
          cells += (rows[i + 1] - rows[i]) * (columns[k + 1] - columns[k]);
        }
      }
    }
    return cells;
  }

  const size = (a) => (a[2] - a[0] + 1) * (a[3] - a[1] + 1);

  function clip(a, b) {
    const c = [Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3])];
    return c[0] <= c[2] && c[1] <= c[3] ? c : null;
  }

  function drawing(sheet, reads) {
    const areas = reads.map((r) => r.area);
    const shown = [...(sheet.used ? [sheet.used] : []), ...areas];
    if (!shown.length) return el("p.dim", {}, "empty");
    // From A1, as a person sees the sheet.  A read far beyond the used range is shown cut off.
    const used = sheet.used || [1, 1, 1, 1];
    const far = (axis, least) => Math.min(Math.max(...shown.map((a) => a[axis])), Math.max(used[axis] * 2, least));
    const rows = far(2, 12), columns = far(3, 6);
    const width = Math.min(WIDE, columns * 16), height = Math.min(HIGH, Math.max(rows * 5, 12));
    const svg = el("svg.cells", {
      viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", width, height,
    });
    const box = (a, name, more) => el(`rect.${name}`, {
      x: a[1] - 1, y: a[0] - 1, width: Math.min(a[3], columns) - a[1] + 1,
      height: Math.min(a[2], rows) - a[0] + 1, ...more,
    });
    svg.append(box([1, 1, rows, columns], "paper"));
    if (sheet.used) svg.append(box(sheet.used, "used"));
    for (const read of reads) {
      if (read.area[0] > rows || read.area[1] > columns) continue;
      const rect = box(read.area, "lit", { "data-turn": read.turn, "data-range": read.range });
      rect.append(svgTitle(`${read.range}${read.turn ? `, read in turn ${read.turn}` : ""}`));
      svg.append(rect);
    }
    if (sheet.used && width / columns >= 4 && height / rows >= 3) {
      const [top, left, bottom, right] = sheet.used;
      for (let r = top; r < bottom; r++) svg.append(el("line.grid", { x1: left - 1, x2: right, y1: r, y2: r }));
      for (let c = left; c < right; c++) svg.append(el("line.grid", { y1: top - 1, y2: bottom, x1: c, x2: c }));
    }
    if (sheet.used) svg.append(box(sheet.used, "outline"));
    return svg;
  }

  function panel(sheet, reads) {
    const inside = sheet.used ? reads.map((r) => clip(r.area, sheet.used)).filter(Boolean) : [];
    const lit = inside.length ? union(inside) : 0;
    const swatch = el("i.tab");
    if (sheet.colour) swatch.style.background = `#${sheet.colour}`;
    const told = sheet.used ? `${count(lit)} of ${count(size(sheet.used))} cells read` : "nothing in it";
    return el("figure.sheet", {
      class: ["sheet", sheet.role, reads.length ? "read" : "unread"].join(" "),
      "data-sheet": sheet.name, "data-lit": lit,
    }, el("figcaption", { title: `${sheet.name} ${sheet.range}: ${told}` }, swatch, el("b", {}, sheet.name),
      sheet.role && sheet.role !== "source" ? el(`span.role.${sheet.role}`, {}, sheet.role) : null),
    drawing(sheet, reads),
    el("small", {}, sheet.range || "empty", reads.length ? el("span.lit-count", {}, ` ${count(lit)} read`) : null));
  }

  // The panels of all sheets, those that were read without being told of included.
  function map(detail) {
    const bySheet = new Map();
    for (const read of detail.reads) {
      if (!bySheet.has(read.sheet)) bySheet.set(read.sheet, []);
      bySheet.get(read.sheet).push(read);
    }
    const known = new Set(detail.sheets.map((s) => s.name));
    const others = [...bySheet.keys()].filter((name) => !known.has(name))
      .map((name) => ({ name, used: null, range: "", colour: null, role: "" }));
    const sheets = [...detail.sheets, ...others];
    if (!sheets.length) return el("p.empty", {}, "Nothing was read, and the workbook wasn't recorded.");
    return el("div.map", {}, sheets.map((sheet) => panel(sheet, bySheet.get(sheet.name) || [])));
  }

  // Lights only what was read in one turn, or again everything (null).
  function highlight(root, turn) {
    for (const rect of root.querySelectorAll(".lit")) {
      rect.classList.toggle("faint", turn !== null && rect.dataset.turn !== String(turn));
    }
  }

  return { map, union, highlight };
})();
