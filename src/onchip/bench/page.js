"use strict";
// Filters, plots and sorting.  The tables are in the page; what is drawn is in #data (see page.py).
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const shown = new Set(data.impls.keys());
const narrow = () => window.innerWidth < 600;
const LEAST_BYTES = 2 ** 18; // less is drawn as this: a logarithm has no zero
const FONT = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif", size: 13, color: "#374151" };
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// ------------------------------------------------------------------------------------------------ numbers and axes

const three = (x) => String(Number(x.toPrecision(3)));
const timeText = (ms) => (ms < 1 ? `${three(ms * 1e3)} µs` : ms < 1e3 ? `${three(ms)} ms` : `${three(ms / 1e3)} s`);
function bytesText(n) {
  if (n <= LEAST_BYTES) return "≤ 256 KiB";
  return n < 2 ** 20 ? `${three(n / 2 ** 10)} KiB` : n < 2 ** 30 ? `${three(n / 2 ** 20)} MiB` : `${three(n / 2 ** 30)} GiB`;
}
const MEASURES = {
  ms: { of: (row) => row.ms, text: timeText, title: "time per step" },
  ratio: { of: (row) => row.ratio, text: (x) => `${three(x)} ×`, title: "time / floor" },
  bytes: { of: (row) => row.bytes === null ? null : Math.max(row.bytes, LEAST_BYTES), text: bytesText, title: "extra memory", binary: true },
};

// Round numbers between low and high: as many as there may be.
const MANTISSAS = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9]];
function ticks(low, high, binary, most) {
  const inside = (all) => all.filter((x) => x >= low && x <= high);
  const powers = (base) => Array.from({ length: 60 }, (_, i) => base ** (i - 10));
  const choices = binary
    ? [8, 6, 5, 4, 3, 2, 1].map((step) => inside(powers(2 ** step)))
    : MANTISSAS.map((ms) => inside(powers(10).flatMap((p) => ms.map((m) => Number((m * p).toPrecision(2))))));
  return choices.filter((x) => x.length <= most).pop() ?? choices[0];
}
function logAxis(values, measure, most) {
  const low = Math.min(...values), high = Math.max(...values);
  const margin = Math.max(1.15, (high / low) ** 0.06);
  const range = [low / margin, high * margin];
  const at = ticks(...range, measure.binary, most);
  return {
    type: "log", range: range.map(Math.log10), tickvals: at, ticktext: at.map(measure.text), title: { text: measure.title, standoff: 8 },
    gridcolor: "#e5e7eb", linecolor: "#9ca3af", zeroline: false, automargin: true,
  };
}
function draw(div, traces, layout) {
  const common = {
    font: FONT, showlegend: false, hovermode: "closest", dragmode: narrow() ? false : "zoom", paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    hoverlabel: { align: "left", bgcolor: "#fff", bordercolor: "#9ca3af", font: { ...FONT, size: 12 } }, margin: { l: 10, r: 16, t: 34, b: 10 },
  };
  const config = { responsive: true, displaylogo: false, displayModeBar: true, modeBarButtons: [narrow() ? ["zoomIn2d", "zoomOut2d", "resetScale2d"] : ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] };
  Plotly.react(div, traces, { ...common, ...layout }, config);
}
const lineAt = (axis, value) => ({
  type: "line", line: { color: "#374151", width: 1.5, dash: "dash" }, [axis + "0"]: value, [axis + "1"]: value,
  ...(axis === "x" ? { yref: "paper", y0: 0, y1: 1 } : { xref: "paper", x0: 0, x1: 1 }),
});
const marker = (impl, size) => ({ color: impl.color, symbol: impl.symbol, size, opacity: 0.9, line: { color: "#fff", width: 1 } });
// A trace for each implementation that is shown, of rows that have the measure.
function traces(rows, make) {
  return data.impls.map((impl, i) => [impl, rows.filter((row) => row.impl === i)])
    .filter(([, mine]) => mine.length)
    .map(([impl, mine]) => ({ type: "scatter", name: escaped(impl.name), hovertemplate: "%{customdata}<extra></extra>", customdata: mine.map((row) => row.hover), ...make(impl, mine) }));
}
function none(section, rows) {
  section.querySelector(".none").hidden = rows.length > 0;
  section.querySelector(".plot").hidden = rows.length === 0;
}

// ---------------------------------------------------------------------------------------------------------- plots

function drawOverview(rows) {
  if (!rows.some((row) => row.ratio !== null) && byId("measure").value === "ratio") byId("measure").value = "ms"; // no floor
  const measure = MEASURES[byId("measure").value];
  const right = rows.filter((row) => measure.of(row) !== null && row.ms !== null);
  none(byId("overview"), right);
  if (!right.length) return;
  const cases = [...new Set(right.map((row) => row.case))];
  const name = (i) => escaped(data.cases[i].name), kind = (i) => escaped(data.cases[i].kind.replace(/, /g, " "));
  const values = right.map(measure.of);
  if (measure === MEASURES.ratio) values.push(1);
  // A little apart, so that equal ones show beside each other.
  const apart = (impl) => (data.impls.length > 1 ? 0.4 * (data.impls.indexOf(impl) / (data.impls.length - 1) - 0.5) : 0);
  // On a phone a case's name stands above its points, else beside them.
  const labels = narrow()
    ? { yaxis: { showticklabels: false }, annotations: cases.map((i, at) => ({ x: 0, xref: "paper", xanchor: "left", y: at - 0.5, yanchor: "top", showarrow: false, align: "left", bgcolor: "#fff", borderpad: 1, yshift: -1, font: { size: 11 }, text: `${name(i)} <span style="color:#6b7280">${kind(i)}</span>` })) }
    : { yaxis: { ticktext: cases.map((i) => `${name(i)}<br><span style="font-size:11px;color:#6b7280">${kind(i)}</span>`), automargin: true } };
  draw("overview-plot", traces(right, (impl, mine) => ({
    mode: "markers", marker: marker(impl, 11), x: mine.map(measure.of), y: mine.map((row) => cases.indexOf(row.case) + apart(impl) + (narrow() ? 0.15 : 0)),
  })), {
    height: 100 + (narrow() ? 56 : 48) * cases.length,
    margin: { l: 10, r: 16, t: 76, b: 10 },
    xaxis: { ...logAxis(values, measure, narrow() ? 5 : 10), side: "top" },
    yaxis: { ...labels.yaxis, tickvals: cases.map((_, i) => i), range: [cases.length - 0.5, -0.5], showgrid: false, zeroline: false, fixedrange: narrow() },
    annotations: labels.annotations ?? [],
    shapes: [
      ...cases.slice(1).map((_, i) => ({ ...lineAt("y", i + 0.5), line: { color: "#e5e7eb", width: 1 }, layer: "below" })),
      ...(measure === MEASURES.ratio ? [lineAt("x", 1)] : []),
    ],
  });
}

function drawOne(rows) {
  const right = rows.filter((row) => row.ms !== null && row.bytes !== null);
  none(byId("one"), right);
  if (!right.length) return;
  const floors = [...new Set(right.map((row) => row.floor))].filter((x) => x !== null);
  const times = right.flatMap((row) => [row.ms, row.p10 ?? row.ms, row.p90 ?? row.ms]).concat(floors);
  draw("one-plot", traces(right, (impl, mine) => ({
    mode: "markers", marker: marker(impl, 12), x: mine.map((row) => row.ms), y: mine.map(MEASURES.bytes.of),
    error_x: { type: "data", symmetric: false, array: mine.map((row) => (row.p90 ?? row.ms) - row.ms), arrayminus: mine.map((row) => row.ms - (row.p10 ?? row.ms)), color: impl.color, thickness: 1.3, width: 0 },
  })), {
    height: narrow() ? 360 : 460,
    xaxis: { ...logAxis(times, { ...MEASURES.ms, title: floors.length ? "time per step (dashed: floor)" : "time per step" }, narrow() ? 4 : 8) },
    yaxis: logAxis(right.map(MEASURES.bytes.of), MEASURES.bytes, 7),
    shapes: floors.map((floor) => lineAt("x", floor)),
  });
}

function drawGrowth(rows) {
  const section = byId("growth");
  section.replaceChildren();
  for (const sweep of data.sweeps) {
    const size = new Map(sweep.points.map(([x, i]) => [i, x]));
    const mine = rows.filter((row) => size.has(row.case) && row.ms !== null);
    if (new Set(mine.map((row) => row.case)).size < 2) continue;
    section.insertAdjacentHTML("beforeend", `<h2>Growth with ${escaped(sweep.swept)} <small>${escaped(sweep.shared)}, ${byId("mode").value}</small></h2><div class="sweep"><div></div><div></div></div>`);
    const xs = [...size.values()];
    const across = { text: String, title: escaped(sweep.letter) };
    for (const [i, measure] of [MEASURES.ms, MEASURES.bytes].entries()) {
      const plot = section.lastElementChild.children[i];
      const floors = [...new Map(mine.filter((row) => row.floor !== null).map((row) => [size.get(row.case), row.floor]))].sort((a, b) => a[0] - b[0]);
      const isTime = measure === MEASURES.ms;
      const lines = traces(mine, (impl, points) => {
        points.sort((a, b) => size.get(a.case) - size.get(b.case));
        return { mode: "lines+markers", marker: marker(impl, 9), line: { color: impl.color, width: 2 }, x: points.map((row) => size.get(row.case)), y: points.map(measure.of), customdata: points.map((row) => row.hover) };
      });
      if (isTime && floors.length) lines.push({ type: "scatter", mode: "lines", line: { color: "#374151", width: 1.5, dash: "dash" }, x: floors.map((f) => f[0]), y: floors.map((f) => f[1]), hovertemplate: "floor: %{customdata}<extra></extra>", customdata: floors.map((f) => timeText(f[1])) });
      const values = mine.map(measure.of).concat(isTime ? floors.map((f) => f[1]) : []);
      const title = isTime && floors.length ? "time per step (dashed: floor)" : measure.title;
      draw(plot, lines, { height: 360, margin: { l: 10, r: 24, t: 40, b: 10 }, xaxis: { ...logAxis(xs, across, 9), tickvals: xs, ticktext: xs.map(across.text) }, yaxis: logAxis(values, { ...measure, title }, 7) });
    }
  }
  section.hidden = !section.childElementCount;
}

// -------------------------------------------------------------------------------------------------------- filters

const trs = [...document.querySelectorAll("#rows tbody tr")];
function update() {
  const mode = byId("mode").value, chosen = byId("case").value;
  const fits = (row) => row.mode === mode && (chosen === "" || row.case === Number(chosen)) && shown.has(row.impl);
  const rows = data.rows.filter(fits);
  data.rows.forEach((row, i) => { trs[i].hidden = !fits(row); });
  const heading = chosen === "" ? `All cases <small>${mode}</small>` : `${escaped(data.cases[chosen].name)} <small>${escaped(data.cases[chosen].kind)}, ${mode}</small>`;
  document.querySelectorAll(".what").forEach((h) => { h.innerHTML = heading; });
  document.querySelectorAll(".mode").forEach((span) => { span.textContent = mode; });
  byId("overview").hidden = chosen !== "";
  byId("one").hidden = chosen === "";
  if (chosen === "") drawOverview(rows); else drawOne(rows);
  drawGrowth(chosen === "" ? rows : []);
}
const option = (value, text) => new Option(text, value);
const many = data.cases.length > 1;
byId("case").append(...(many ? [option("", `all ${data.cases.length} cases`)] : []), ...data.cases.map((c, i) => option(i, `${c.name} (${c.kind})`)));
byId("mode").append(...data.modes.map((mode) => option(mode, mode)));
byId("mode").value = data.mode;
for (const id of ["case", "mode", "measure"]) byId(id).addEventListener("change", update);
const chips = [...document.querySelectorAll(".chip")];
function show(i, on) {
  if (on) shown.add(i); else shown.delete(i);
  chips[i].setAttribute("aria-pressed", String(on));
}
chips.forEach((chip, i) => chip.addEventListener("click", () => { show(i, !shown.has(i)); update(); }));
for (const [id, on] of [["all", true], ["none", false]]) byId(id).addEventListener("click", () => { chips.forEach((_, i) => show(i, on)); update(); });

// -------------------------------------------------------------------------------------------------------- sorting

// Nothing comes last, whichever way.
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}
document.querySelectorAll("#rows th.sort").forEach((th) => th.addEventListener("click", () => {
  const sign = th.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  document.querySelectorAll("#rows th.sort").forEach((other) => other.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const keys = data.keys[Number(th.dataset.column)];
  const order = [...trs.keys()].sort((i, j) => compare(keys[i], keys[j], sign));
  document.querySelector("#rows tbody").append(...order.map((i) => trs[i]));
}));

update();
