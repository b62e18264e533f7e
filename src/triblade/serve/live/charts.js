// Lines over time as SVG. Knows points and names only.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 400, HEIGHT = 150, LEFT = 44, RIGHT = 6, TOP = 22, BOTTOM = 16;

function make(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

export function short(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

// series: [{name, points: [[seconds ago, value], ...]}]; a value that is null breaks the line.
export function drawLines(parent, series, seconds) {
  const values = series.flatMap(({points}) => points.map(([, value]) => value)).filter((value) => value !== null);
  const top = (Math.max(...values, 0) || 1) * 1.1;
  const x = (ago) => WIDTH - RIGHT - (WIDTH - LEFT - RIGHT) * Math.min(ago / seconds, 1);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top;
  const svg = make("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"});
  svg.setAttribute("aria-label", series.map(({name, points}) => `${name}: ${short(lastValue(points))}`).join(", "));
  for (const share of [0, 0.5, 1]) {
    const level = top * share / 1.1;
    svg.append(make("path", {class: "grid", d: `M${LEFT} ${y(level)}H${WIDTH - RIGHT}`}));
    svg.append(make("text", {x: LEFT - 4, y: y(level) + 4, "text-anchor": "end"}, values.length ? short(level) : ""));
  }
  svg.append(make("text", {x: LEFT, y: HEIGHT - 3}, `${seconds / 60} min ago`));
  svg.append(make("text", {x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end"}, "now"));
  series.forEach(({name, points}, number) => {
    for (const piece of pieces(points)) {
      const places = piece.map(([ago, value]) => `${x(ago).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
      svg.append(make("polyline", {class: `series${number}`, points: places}));
    }
    const label = `${name} ${short(lastValue(points))}`;
    svg.append(make("text", {class: `series${number}`, x: LEFT + 130 * number, y: 13}, label));
  });
  parent.replaceChildren(svg);
}

function lastValue(points) {
  const known = points.filter(([, value]) => value !== null);
  return known.length ? known[known.length - 1][1] : NaN;
}

function pieces(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found[found.length - 1].push(point);
  }
  return found.filter((piece) => piece.length > 1);
}
