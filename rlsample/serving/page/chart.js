// A line chart as SVG: a dot per value (or per group of values), a running mean, a goal line. Colours come from the
// style sheet, so that it follows light and dark by itself.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 640; // where the page has not laid it out yet
const HEIGHT = 210;
const LEFT = 42;
const RIGHT = 10;
const TOP = 12;
const BOTTOM = 26;
const MOST_DOTS = 240;

export class Chart {
  // host: an element to fill. options: title (said to screen readers), unit, goal (a value to mark), window (values in
  // the running mean; 0: none), empty (shown until there is a value).
  constructor(host, options) {
    this.options = { unit: "", goal: null, window: 0, empty: "no values yet", ...options };
    this.svg = element("svg", { role: "img", class: "chart", height: HEIGHT });
    host.replaceChildren(this.svg);
    this.draw([]);
    new ResizeObserver(() => this.draw(this.values, this.firstNumber)).observe(host);
  }

  // values: oldest first. firstNumber: which episode (or second) the first one is.
  draw(values, firstNumber = 1) {
    Object.assign(this, { values, firstNumber, width: this.svg.clientWidth || WIDTH });
    const { title, goal, window } = this.options;
    const right = this.width - RIGHT;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", `${title}: ${this.inWords(values)}`);
    const top = niceCeiling(Math.max(1, goal ?? 0, ...extremes(values)));
    const bottom = -niceCeiling(-extremes(values)[0]) || 0; // never -0
    const x = (i) => LEFT + ((right - LEFT) * (i + 0.5)) / Math.max(values.length, 1);
    const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (top - value)) / (top - bottom);
    const parts = this.axes(values, firstNumber, x, y, bottom, top);
    if (goal !== null) parts.push(line("goal", LEFT, y(goal), right, y(goal)));
    const dots = grouped(values, MOST_DOTS);
    if (window > 0) {
      parts.push(...dots.map((dot) => element("circle", { class: "dot", cx: x(dot.at), cy: y(dot.value), r: 2 })));
      parts.push(path("mean", grouped(runningMean(values, window), MOST_DOTS), x, y));
    } else {
      parts.push(path("mean", dots, x, y));
    }
    if (values.length === 0) parts.push(text("empty", (LEFT + right) / 2, HEIGHT / 3, this.options.empty, "middle"));
    this.svg.replaceChildren(...parts);
  }

  axes(values, firstNumber, x, y, bottom, top) {
    const right = this.width - RIGHT;
    const parts = [];
    for (const value of [bottom, (bottom + top) / 2, top]) {
      parts.push(line("grid", LEFT, y(value), right, y(value)));
      parts.push(text("tick", LEFT - 6, y(value) + 4, tick(value), "end"));
    }
    if (values.length > 0) {
      const last = values.length - 1;
      parts.push(text("tick", last > 0 ? LEFT : x(0), HEIGHT - 8, String(firstNumber), last > 0 ? "start" : "middle"));
      if (last > 0) parts.push(text("tick", right, HEIGHT - 8, String(firstNumber + last), "end"));
    }
    parts.push(text("tick", (LEFT + right) / 2, HEIGHT - 8, this.options.unit, "middle"));
    return parts;
  }

  inWords(values) {
    if (values.length === 0) return this.options.empty;
    const recent = runningMean(values, this.options.window || values.length).at(-1);
    return `${values.length} values, the last is ${short(values.at(-1))}, the recent mean ${short(recent)}`;
  }
}

// Element i is the mean of values i - window + 1 to i, of fewer at the start.
export function runningMean(values, window) {
  let sum = 0;
  return values.map((value, i) => {
    sum += value - (i >= window ? values[i - window] : 0);
    return sum / Math.min(i + 1, window);
  });
}

// At most `most` groups of neighbours, each as its mean and middle place.
export function grouped(values, most) {
  const size = Math.ceil(values.length / most) || 1;
  const groups = [];
  for (let start = 0; start < values.length; start += size) {
    const part = values.slice(start, start + size);
    groups.push({ at: start + (part.length - 1) / 2, value: part.reduce((a, b) => a + b, 0) / part.length });
  }
  return groups;
}

// The next of 1, 2, 5, 10, 20, 50, ... that is not below a number above 0; else 0.
export function niceCeiling(value) {
  if (!(value > 0)) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value) ?? 10 * unit;
}

function extremes(values) {
  let [low, high] = [0, 0];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

// 1,500 as 1.5K: it has to fit beside the chart.
function tick(value) {
  return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
}

function short(value) {
  return new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format(value);
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function line(kind, x1, y1, x2, y2) {
  return element("line", { class: kind, x1, y1, x2, y2 });
}

function path(kind, points, x, y) {
  const d = points.map(({ at, value }, i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  return element("path", { class: kind, d: d || "M0 0" });
}

function text(kind, x, y, words, anchor) {
  const made = element("text", { class: kind, x, y, "text-anchor": anchor });
  made.textContent = words;
  return made;
}
