// Draws the charts of a report from the JSON in the page. Without libraries and without network.
"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const runs = content.runs;
  const LEFT = 58, RIGHT = 14, TOP = 8, BOTTOM = 24, MOST_DOTS = 100;
  const state = {axis: "step", scale: "linear", shown: new Set(runs.map((_, index) => index)), at: null, from: null};
  const plots = [];

  const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  function short(value) {
    const [size, unit] = UNITS.find(([size]) => Math.abs(value) >= size) || [1, ""];
    return trimmed(value / size) + (unit && " " + unit);
  }
  const trimmed = value => String(Number(value.toPrecision(4)));
  const grouped = value => Math.round(value).toLocaleString("en-US");
  const forms = {
    number: trimmed,
    loss: value => value.toFixed(4),
    small: value => value.toExponential(2),
    count: value => grouped(value),
    percent: value => (100 * value).toFixed(1) + "%",
    bytes: value => value < 2 ** 30 ? trimmed3(value / 2 ** 20) + " MiB" : trimmed3(value / 2 ** 30) + " GiB",
    seconds: trimmed,
  };
  const trimmed3 = value => value < 1000 ? String(Number(value.toPrecision(3))) : grouped(value);
  const marks = {
    count: short,
    small: value => value === 0 ? "0" : value.toExponential(1).replace(".0e", "e"),
    loss: trimmed,
    percent: value => trimmed(100 * value) + "%",
  };

  function element(name, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }
  function tag(name, className, parent, text) {
    const made = document.createElement(name);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // Round numbers from low to high, about `count` of them. With `binary`, steps are powers of two, as for bytes.
  function ticks(low, high, count, binary) {
    const rough = (high - low) / count || 1;
    let step = binary ? 2 ** Math.ceil(Math.log2(rough)) : 10 ** Math.floor(Math.log10(rough));
    if (!binary) step *= [1, 2, 5, 10].find(times => times * step >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const times of [1, 2, 5]) if (times * 10 ** power >= low && times * 10 ** power <= high) found.push(times * 10 ** power);
    if (found.length < 2) return ticks(low, high, 4, false).filter(value => value > 0);
    const whole = found.filter(value => Math.abs(Math.log10(value) % 1) < 1e-9 || Math.abs(Math.log10(value) % 1) > 1 - 1e-9);
    return found.length > 7 && whole.length > 1 ? whole : found;
  }

  // The curve of a run with the metric, or null. Steps and tokens are the last of each bucket.
  function curveOf(run, metric) {
    const found = run.curves.find(curve => metric in curve.series);
    if (!found) return null;
    const x = found[state.axis];
    return {run, x, first: found.first, step: found.step, tokens: found.tokens, ...found.series[metric]};
  }

  class Plot {
    constructor(box) {
      this.box = box;
      this.chart = content.charts.find(chart => chart.metric === box.dataset.metric);
      this.tip = null;
      box.addEventListener("pointermove", event => this.point(event));
      box.addEventListener("pointerdown", event => this.point(event));
      box.addEventListener("pointerleave", () => move(null, null));
      box.addEventListener("keydown", event => this.key(event));
      box.addEventListener("blur", () => move(null, null));
      new ResizeObserver(() => this.draw()).observe(box);
    }

    curves() {
      return runs.map((run, index) => state.shown.has(index) ? curveOf(run, this.chart.metric) : null)
        .filter(curve => curve && curve.x.some(value => value !== null));
    }

    // Ranges of both axes. The vertical range has the lines and most of the bands, so that a spike does not flatten them.
    ranges(curves) {
      const x = [Infinity, -Infinity], y = [Infinity, -Infinity];
      for (const {x: xs, mean} of curves)
        mean.forEach((value, i) => {
          if (xs[i] === null) return;
          x[0] = Math.min(x[0], xs[i]); x[1] = Math.max(x[1], xs[i]);
          if (value === null || (this.log && value <= 0)) return;
          y[0] = Math.min(y[0], value); y[1] = Math.max(y[1], value);
        });
      if (!(y[1] >= y[0])) return null;
      for (const {low, high} of curves)
        if (high) {
          y[0] = Math.min(y[0], quantile(low.filter(value => this.visible(value)), 0.05, y[0]));
          y[1] = Math.max(y[1], quantile(high.filter(value => this.visible(value)), 0.95, y[1]));
        }
      if (this.log) {
        const pad = Math.max(0.02, 0.05 * Math.log10(y[1] / y[0]));
        return {x, y: [y[0] / 10 ** pad, y[1] * 10 ** pad]};
      }
      if (this.chart.zero && y[0] >= 0) return {x, y: [0, y[1] * 1.06 || 1]};
      const pad = 0.06 * (y[1] - y[0]) || Math.abs(y[1]) * 0.05 || 1;
      return {x, y: [y[0] - pad, y[1] + pad]};
    }

    draw() {
      const width = this.box.clientWidth, height = this.box.clientHeight;
      if (!width) return;
      this.box.replaceChildren();
      this.tip = null;
      const curves = this.curves();
      this.log = state.scale === "log" && curves.some(curve => curve.mean.some(value => value > 0));
      const range = this.ranges(curves);
      const svg = this.svg = element("svg", {viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true"}, this.box);
      if (!range) {
        this.scaleX = null;
        element("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, svg, "no values");
        return;
      }
      const [x0, x1] = range.x[0] < range.x[1] ? range.x : [range.x[0] - 1, range.x[1] + 1];
      const [y0, y1] = this.log ? range.y.map(Math.log10) : range.y;
      this.scaleX = value => LEFT + (value - x0) / (x1 - x0) * (width - LEFT - RIGHT);
      this.unscaleX = place => x0 + (place - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
      const scaleY = value => TOP + (y1 - (this.log ? Math.log10(value) : value)) / (y1 - y0) * (height - TOP - BOTTOM);
      this.scaleY = value => Math.max(TOP - 50, Math.min(height - BOTTOM + 50, scaleY(value)));
      this.axes(svg, width, height, [x0, x1], range.y);
      const clip = `clip-${plots.indexOf(this)}`;
      element("rect", {x: LEFT - 4, y: TOP - 4, width: width - LEFT - RIGHT + 8, height: height - TOP - BOTTOM + 4},
        element("clipPath", {id: clip}, svg));
      const area = element("g", {"clip-path": `url(#${clip})`}, svg);
      for (const curve of curves) this.curve(area, curve, height);
      this.cross = element("path", {class: "cross"}, svg);
      this.dots = element("g", {}, svg);
      if (state.at !== null) this.show();
    }

    axes(svg, width, height, [x0, x1], y) {
      const form = marks[this.chart.form] || forms[this.chart.form];
      const listed = this.log ? logTicks(...y) : ticks(...y, 5, this.chart.form === "bytes");
      for (const value of listed) {
        const place = Math.round(this.scaleY(value)) + 0.5;
        element("path", {class: "rule", d: `M${LEFT} ${place}H${width - RIGHT}`}, svg);
        element("text", {x: LEFT - 7, y: place + 4, "text-anchor": "end"}, svg, form(value));
      }
      const whole = ticks(x0, x1, Math.max(2, Math.floor((width - LEFT - RIGHT) / 64)), false).filter(value => Number.isInteger(value) && value >= 0);
      for (const value of whole) {
        const place = this.scaleX(value), end = place > width - RIGHT - 20;
        element("text", {x: end ? width - RIGHT : place, y: height - 7, "text-anchor": end ? "end" : "middle"}, svg, short(value));
      }
    }

    curve(area, curve, height) {
      const points = curve.x.map((x, i) => [x, curve.mean[i], i]).filter(([x, value]) => x !== null && this.visible(value));
      const group = element("g", {class: `c${curve.run.color}`}, area);
      for (const step of curve.run.starts) {
        const x = this.startPlace(curve, step);
        if (x !== null) element("path", {class: "start", d: `M${x} ${TOP}V${height - BOTTOM}`}, group);
      }
      if (curve.high) {
        const ends = points.map(([x, , i]) => [x, curve.low[i], curve.high[i]]);
        const floor = Math.min(...ends.map(([, , high]) => high).filter(high => high > 0));  // of a log axis
        const up = ends.map(([x, , high]) => this.place(x, high));
        const down = ends.reverse().map(([x, low]) => this.place(x, this.log && low <= 0 ? floor : low));
        element("path", {class: "band", d: `M${[...up, ...down].join("L")}Z`}, group);
      }
      const isSmooth = curve.smooth && curve.smooth.some(value => value !== null);
      element("path", {class: isSmooth ? "raw" : "curve" + (curve.run.dashed ? " dashed" : ""), d: this.line(curve, curve.mean)}, group);
      if (isSmooth) element("path", {class: "curve" + (curve.run.dashed ? " dashed" : ""), d: this.line(curve, curve.smooth)}, group);
      if ((this.chart.points && points.length <= MOST_DOTS) || points.length === 1)
        for (const [x, value] of points) element("circle", {class: "dot", cx: this.scaleX(x), cy: this.scaleY(value), r: 3.5}, group);
    }

    visible(value) { return value !== null && (!this.log || value > 0); }
    place(x, value) { return `${this.scaleX(x).toFixed(1)} ${this.scaleY(value).toFixed(1)}`; }

    // A missing value interrupts the line; of metrics that only some steps have, neighbors are connected.
    line(curve, values) {
      let path = "", pen = "M";
      const known = values.filter(value => value !== null).length;
      const connects = known < 0.5 * values.length;
      values.forEach((value, i) => {
        if (curve.x[i] === null || !this.visible(value)) { if (!connects) pen = "M"; return; }
        path += pen + this.place(curve.x[i], value);
        pen = "L";
      });
      return path;
    }

    startPlace(curve, step) {
      if (state.axis === "step") return this.scaleX(step);
      const index = curve.step.findIndex(value => value >= step);
      return index < 0 || curve.tokens[index] === null ? null : this.scaleX(curve.tokens[index]);
    }

    point(event) {
      if (!this.scaleX) return;
      const place = event.clientX - this.box.getBoundingClientRect().left;
      move(this.unscaleX(place), this);
    }

    key(event) {
      const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (event.key === "Escape") move(null, null);
      if (!by || !this.scaleX) return;
      event.preventDefault();
      const all = [...new Set(this.curves().flatMap(curve => curve.x.filter((x, i) => x !== null && curve.mean[i] !== null)))].sort((a, b) => a - b);
      const index = state.at === null ? (by > 0 ? -1 : all.length) : nearest(all, state.at);
      move(all[Math.max(0, Math.min(all.length - 1, index + by))], this);
    }

    // Draw the cross at state.at, and in the chart of the pointer the values of each run.
    show() {
      if (!this.scaleX) return;
      this.dots.replaceChildren();
      if (this.tip) this.tip.remove();
      this.tip = null;
      const hits = state.at === null ? [] : this.curves().map(curve => this.hit(curve)).filter(Boolean);
      if (!hits.length) { this.cross.setAttribute("d", ""); return; }
      const closest = hits.reduce((a, b) => Math.abs(b.x - state.at) < Math.abs(a.x - state.at) ? b : a);
      const x = this.scaleX(closest.x), height = this.box.clientHeight;
      this.cross.setAttribute("d", `M${x} ${TOP}V${height - BOTTOM}`);
      for (const hit of hits)
        element("circle", {class: `dot c${hit.curve.run.color}`, cx: this.scaleX(hit.x), cy: this.scaleY(hit.value), r: 4}, this.dots);
      if (state.from === this) this.showTip(hits, closest, x);
    }

    hit(curve) {
      const known = [];
      curve.x.forEach((x, i) => { if (x !== null && this.visible(curve.mean[i])) known.push(i); });
      if (!known.length) return null;
      const index = known[nearest(known.map(i => curve.x[i]), state.at)];
      const slack = 6 * (this.unscaleX(1) - this.unscaleX(0));  // six pixels beyond the end of a run
      if (state.at > curve.x[known[known.length - 1]] + slack || state.at < curve.x[known[0]] - slack) return null;
      return {curve, index, x: curve.x[index], value: curve.mean[index]};
    }

    showTip(hits, closest, x) {
      const form = forms[this.chart.form], {curve, index} = closest;
      const tip = this.tip = tag("div", "tip", this.box);
      const steps = curve.first[index] < curve.step[index] ? `steps ${grouped(curve.first[index])}–${grouped(curve.step[index])}` : `step ${grouped(curve.step[index])}`;
      tag("b", "", tip, steps + (curve.tokens[index] === null ? "" : `, ${short(curve.tokens[index])} tokens`));
      for (const hit of hits) {
        const row = tag("div", `c${hit.curve.run.color}`, tip);
        tag("i", "key" + (hit.curve.run.dashed ? " dashed" : ""), row);
        if (runs.length > 1) tag("em", "", row, hit.curve.run.name);
        tag("span", "value", row, form(hit.value));
        const {low, high} = hit.curve;
        if (low && low[hit.index] !== high[hit.index]) tag("span", "range", row, `${form(low[hit.index])} – ${form(high[hit.index])}`);
      }
      const width = this.box.clientWidth, wide = Math.ceil(tip.getBoundingClientRect().width);
      const place = x + 12 + wide <= width ? x + 12 : x - 12 - wide >= 0 ? x - 12 - wide : Math.max(0, width - wide);
      tip.style.left = `${place}px`;
    }
  }

  function quantile(values, share, fallback) {
    const sorted = values.sort((a, b) => a - b);
    return sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : fallback;
  }

  function nearest(sorted, value) {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value) low = middle + 1; else high = middle;
    }
    return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
  }

  function move(at, from) {
    if (at === null && state.at === null) return;
    state.at = at;
    state.from = from;
    for (const plot of plots) if (plot.svg) plot.show();
  }
  function redraw() {
    state.at = state.from = null;
    for (const plot of plots) plot.draw();
  }

  for (const box of document.querySelectorAll(".plot")) plots.push(new Plot(box));
  const bar = document.querySelector(".bar");
  if (bar) {
    bar.hidden = false;
    bar.addEventListener("change", event => {
      const {name, value, checked} = event.target;
      if (name === "run") state.shown[checked ? "add" : "delete"](Number(value));
      else state[name] = value;
      redraw();
    });
    for (const input of bar.querySelectorAll("input")) input.checked = input.defaultChecked;  // a reload restores them
  }
})();
