"use strict";
// Axes, zoom and the values at the pointer of every chart. Without it the lines are still there.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const UNITS = 1000;

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let tick = Math.ceil(low / step); tick * step <= high; tick += 1) found.push(tick * step);
    return found;
  }

  const number = (value) => String(Number(value.toPrecision(6)));

  function setUp(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const root = figure.querySelector("svg[role=img]");
    const plot = root.querySelector(".plot");
    const axes = root.querySelector(".axes");
    const shade = root.querySelector(".selection");
    const cursor = root.querySelector(".cursor");
    const values = figure.querySelector(".values");
    const idle = values.textContent;
    const [left, top, width, height] = ["x", "y", "width", "height"].map((name) =>
      Number(plot.getAttribute(name)));
    const [xLow, xHigh] = data.x;
    const [yLow, yHigh] = data.y;
    let view = [xLow, xHigh];

    const across = (x) => ((x - xLow) / (xHigh - xLow)) * UNITS;
    const down = (y) => ((yHigh - y) / (yHigh - yLow)) * UNITS;
    const pixel = (x) => left + ((x - view[0]) / (view[1] - view[0])) * width;

    function visibleRange() {
      let low = Infinity, high = -Infinity;
      for (const line of data.lines) {
        for (const [x, y] of line.points) {
          if (y === null || x < view[0] || x > view[1]) continue;
          low = Math.min(low, y);
          high = Math.max(high, y);
        }
      }
      if (low > high || (view[0] === xLow && view[1] === xHigh)) return [yLow, yHigh];
      const room = (high - low) * 0.04 || Math.abs(high) * 0.04 || 1;
      return [low - room, high + room];
    }

    function label(x, y, text, anchor) {
      const made = document.createElementNS(SVG, "text");
      made.setAttribute("x", x);
      made.setAttribute("y", y);
      made.setAttribute("text-anchor", anchor);
      made.textContent = text;
      axes.append(made);
    }

    function rule(x1, y1, x2, y2) {
      const made = document.createElementNS(SVG, "line");
      Object.entries({x1, y1, x2, y2}).forEach(([name, value]) => made.setAttribute(name, value));
      axes.append(made);
    }

    function draw() {
      const [low, high] = visibleRange();
      plot.setAttribute("viewBox", [
        across(view[0]), down(high), across(view[1]) - across(view[0]), down(low) - down(high),
      ].join(" "));
      axes.replaceChildren();
      for (const tick of ticks(view[0], view[1], 8)) {
        label(pixel(tick), top + height + 18, number(tick), "middle");
        rule(pixel(tick), top + height, pixel(tick), top + height + 5);
      }
      for (const tick of ticks(low, high, 5)) {
        const y = top + ((high - tick) / (high - low)) * height;
        label(left - 8, y + 4, number(tick), "end");
        rule(left, y, left + width, y);
      }
      for (const mark of root.querySelectorAll(".mark")) {
        const x = pixel(xLow + (Number(mark.dataset.x) / UNITS) * (xHigh - xLow));
        mark.setAttribute("transform", `translate(${x} ${mark.dataset.y})`);
        mark.style.display = x < left - 1 || x > left + width + 1 ? "none" : "";
      }
    }

    function show(from, to) {
      const span = Math.max(to - from, (xHigh - xLow) / 1e4);
      const start = Math.min(Math.max(from, xLow), xHigh - span);
      view = span >= xHigh - xLow ? [xLow, xHigh] : [start, start + span];
      draw();
    }

    function zoom(factor) {
      const middle = (view[0] + view[1]) / 2;
      const half = ((view[1] - view[0]) / 2) * factor;
      show(middle - half, middle + half);
    }

    const shift = (part) => show(
      view[0] + part * (view[1] - view[0]), view[1] + part * (view[1] - view[0]));
    const actions = {
      in: () => zoom(0.5), out: () => zoom(2), all: () => show(xLow, xHigh),
      left: () => shift(-0.25), right: () => shift(0.25),
    };
    for (const button of figure.querySelectorAll("button")) {
      button.addEventListener("click", actions[button.dataset.action]);
    }

    function valueAt(event) {
      const box = root.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * root.viewBox.baseVal.width;
      const part = Math.min(Math.max((x - left) / width, 0), 1);
      return view[0] + part * (view[1] - view[0]);
    }

    // Long lines are thinned, each on its own: the point of another line may be a little apart.
    function nearestOf(line, x) {
      const reach = Math.max(0.5, (view[1] - view[0]) / 200);
      const distance = (point) => Math.abs(point[0] - x);
      let best = null;
      for (const point of line.points) {
        if (distance(point) <= reach && (!best || distance(point) < distance(best))) best = point;
      }
      return best;
    }

    function describe(x) {
      let nearest = null;
      for (const line of data.lines) {
        for (const [at] of line.points) {
          if (nearest === null || Math.abs(at - x) < Math.abs(nearest - x)) nearest = at;
        }
      }
      const found = [];
      for (const line of data.lines) {
        const point = nearestOf(line, nearest);
        if (point && point[1] !== null) found.push(`${line.name}: ${number(point[1])}`);
      }
      cursor.setAttribute("x1", pixel(nearest));
      cursor.setAttribute("x2", pixel(nearest));
      cursor.style.display = "";
      values.textContent = `${figure.dataset.x} ${number(nearest)} · ${found.join(" · ")}`;
    }

    let began = null;
    root.addEventListener("pointerdown", (event) => { began = valueAt(event); });
    root.addEventListener("pointermove", (event) => {
      const x = valueAt(event);
      describe(x);
      shade.style.display = began === null ? "none" : "";
      if (began === null) return;
      shade.setAttribute("x", pixel(Math.min(began, x)));
      shade.setAttribute("width", Math.abs(pixel(x) - pixel(began)));
    });
    root.addEventListener("pointerup", (event) => {
      const x = valueAt(event);
      shade.style.display = "none";
      if (began !== null && Math.abs(pixel(x) - pixel(began)) > 5) {
        show(Math.min(began, x), Math.max(began, x));
      }
      began = null;
    });
    root.addEventListener("pointerleave", () => {
      began = null;
      shade.style.display = cursor.style.display = "none";
      values.textContent = idle;
    });
    root.addEventListener("dblclick", actions.all);
    draw();
  }

  document.querySelectorAll("figure.chart").forEach(setUp);
  // Read by the PNG export, which needs the height before it opens the page a second time.
  document.documentElement.dataset.height = document.documentElement.scrollHeight;
})();
