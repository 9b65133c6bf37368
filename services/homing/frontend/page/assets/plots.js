// Plots: SVG, drawn anew with each sample.

import { $ } from "./dom.js";
import { GAP_S, SPAN_S, samples } from "./samples.js";

const FRESH_S = 60; // for how long the latest value is news
const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** The least of 1, 2, 5 times a power of ten that is not below `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/** Points parted where neighbours are too far from each other to be joined. */
function runs(points) {
  const found = [];
  points.forEach((point, index) => {
    if (index === 0 || point[0] - points[index - 1][0] > GAP_S) found.push([]);
    found.at(-1).push(point);
  });
  return found;
}

/**
 * Draws points [time, value or null] into `holder`. `show` writes a value; `ceiling` fixes the top
 * of the axis; `marks` are single points; `label` describes the plot to those who cannot see it.
 */
export function plot(holder, points, { show, ceiling, marks = [], label, bare = false }) {
  const { clientWidth: width, clientHeight: height } = holder;
  const [top, bottom] = bare ? [2, height - 2] : [14, height - 18];
  const end = samples.at(-1).time_s;
  const isShown = ([time, value]) => value !== null && time > end - SPAN_S;
  const values = [...points, ...marks].filter(isShown).map((point) => point[1]);
  const most = ceiling ?? niceCeiling(Math.max(1e-3, ...values));
  const x = (time) => width * (1 - (end - time) / SPAN_S);
  const y = (value) => bottom - (bottom - top) * Math.min(1, value / most);
  const svg = shape("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${height}` });
  if (!bare) {
    for (const value of [0, most / 2, most]) {
      svg.append(shape("line", { class: "grid", x1: 0, x2: width, y1: y(value), y2: y(value) }));
    }
    svg.append(shape("text", { x: 0, y: top - 4 }, show(most)));
    svg.append(shape("text", { x: 0, y: height - 4 }, "5 min ago"));
    svg.append(shape("text", { x: width, y: height - 4, "text-anchor": "end" }, "now"));
  }
  for (const run of runs(points.filter(isShown))) {
    const path = run.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
    const [from, to] = [x(run[0][0]).toFixed(1), x(run.at(-1)[0]).toFixed(1)];
    const line = path.join("L");
    const area = `M${from},${bottom}L${line}L${to},${bottom}Z`;
    svg.append(shape("path", { class: "area", d: area }));
    svg.append(shape("path", { class: "curve", d: `M${line}` }));
  }
  for (const [time, value] of marks.filter(isShown)) {
    svg.append(shape("circle", { class: "mark", cx: x(time), cy: y(value), r: 3.5 }));
  }
  holder.replaceChildren(svg);
}

/** A plot below the latest of its values, as long as that is not too old to be news. */
export function figure(id, points, options) {
  const box = document.getElementById(id);
  const [, value] = [...points, ...(options.marks ?? [])].reduce(
    (latest, point) => (point[1] !== null && point[0] >= latest[0] ? point : latest),
    [samples.at(-1).time_s - FRESH_S, null],
  );
  const shown = value === null ? "–" : options.show(value);
  const [number, unit = options.unit ?? ""] = shown.split(" ");
  $("output", box).value = number;
  $(".unit", box).textContent = unit;
  const label = `${$("figcaption", box).textContent}: ${shown} ${options.unit ?? ""}`;
  plot($(".plot", box), points, { ...options, label });
}
