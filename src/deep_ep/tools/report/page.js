"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const sharp = (canvas, width, height) => {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
};
const rgb = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
const timeText = (us) => {
  const [size, unit] = us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const value = us / size;
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ${unit}`;
};

// The load of the experts over time: a pixel for each expert and dispatch, stretched.
function drawLoad() {
  const canvas = document.getElementById("load");
  if (!canvas || !data.load) return;
  const cells = data.load.cells;
  const [low, high] = [rgb(css("--empty")), rgb(css("--blue"))];
  const most = Math.max(1, ...cells.map((row) => Math.max(...row)));
  canvas.width = cells[0].length;
  canvas.height = cells.length;
  canvas.style.imageRendering = "pixelated";
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(canvas.width, canvas.height);
  cells.flat().forEach((count, place) => {
    const share = count / most;
    for (let part = 0; part < 3; part++) image.data[4 * place + part] = low[part] + (high[part] - low[part]) * share;
    image.data[4 * place + 3] = 255;
  });
  pen.putImageData(image, 0, 0);
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.min(cells[0].length - 1, Math.floor(((event.clientX - box.left) / box.width) * cells[0].length));
    const row = Math.min(cells.length - 1, Math.floor(((event.clientY - box.top) / box.height) * cells.length));
    const expert = row * data.load.height;
    canvas.title = `expert ${expert}, dispatch ${column * data.load.width + 1}: ${cells[row][column].toLocaleString("en")} tokens`;
  };
}

// The timeline.
const chart = (() => {
  const canvas = document.getElementById("timeline");
  if (!canvas) return null;
  const line = data.timeline, tip = document.getElementById("tip");
  const HEIGHTS = { plain: 15, thick: 18, thin: 11 }, AXIS = 24, GAP = 12;
  const first = Math.max(0, line.since), last = Math.max(line.span, first + 1);
  const margin = (last - first) * 0.01;
  let view = [first - margin, last + margin], colours = [], rows = [], gutter = 120, width = 0, height = 0, drawn = 0;

  function layout() {
    width = canvas.clientWidth || canvas.parentElement.clientWidth;
    gutter = width < 560 ? 58 : 150;
    rows = [];
    let top = AXIS;
    for (const rank of line.ranks) {
      rank.top = top;
      for (const row of rank.rows) {
        rows.push({ row, rank, top, height: HEIGHTS[row.kind] });
        top += HEIGHTS[row.kind] + 1;
      }
      if (!rank.rows.length) top += HEIGHTS.plain;
      rank.bottom = top;
      top += GAP;
    }
    height = top;
    canvas.style.height = `${height}px`;
  }
  const toX = (us) => gutter + ((us - view[0]) / (view[1] - view[0])) * (width - gutter);
  const toTime = (x) => view[0] + ((x - gutter) / (width - gutter)) * (view[1] - view[0]);

  function firstAfter(slices, us) {
    // Slices of a row do not overlap, so their ends ascend, too.
    let low = 0, high = slices.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (slices[middle][0] + slices[middle][1] < us) low = middle + 1; else high = middle;
    }
    return low;
  }

  function drawAxis(pen) {
    const span = view[1] - view[0], wanted = span / Math.max(2, Math.floor((width - gutter) / 80));
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= wanted);
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (let at = Math.ceil(view[0] / step) * step; at <= view[1]; at += step) {
      const x = toX(at);
      pen.strokeStyle = css("--line");
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillStyle = css("--faint");
      const [size, unit] = step >= 1e6 ? [1e6, "s"] : step >= 1e3 ? [1e3, "ms"] : [1, "µs"];
      const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
      const label = `${(Math.abs(at) < step / 1e3 ? 0 : at / size).toFixed(digits)} ${unit}`;
      if (x >= gutter && x < width - 22) pen.fillText(label, x, 12);
    }
  }

  function drawRow(pen, { row, top, height: rowHeight }) {
    const lastPixel = new Int32Array(line.kinds.length).fill(-1);
    for (let index = firstAfter(row.slices, view[0]); index < row.slices.length; index++) {
      const [begin, duration, name, kind] = row.slices[index];
      if (begin > view[1]) break;
      const left = Math.max(gutter, toX(begin)), right = Math.min(width, toX(begin + duration));
      const wide = Math.max(1, right - left - (right - left > 3 ? 0.5 : 0));
      if (wide <= 1.5) {
        if (Math.floor(left) === lastPixel[kind]) continue; // many in one pixel look like one
        lastPixel[kind] = Math.floor(left);
      }
      pen.fillStyle = colours[kind];
      pen.fillRect(left, top, wide, rowHeight);
      drawn++;
      if (wide > 34 && rowHeight > 12) {
        pen.fillStyle = kind === 4 ? "#1c1400" : css("--on");
        pen.font = "11px system-ui, sans-serif";
        pen.textAlign = "left";
        let text = line.names[name];
        const room = wide - 8;
        if (pen.measureText(text).width > room) {
          while (text.length > 2 && pen.measureText(text + "…").width > room) text = text.slice(0, -1);
          text += "…";
        }
        if (text.length > 3) pen.fillText(text, left + 4, top + rowHeight / 2 + 4);
      }
    }
  }

  function drawLabels(pen) {
    pen.textAlign = "left";
    for (const rank of line.ranks) {
      pen.strokeStyle = css("--line");
      pen.beginPath();
      pen.moveTo(0, rank.top - GAP / 2);
      pen.lineTo(width, rank.top - GAP / 2);
      pen.stroke();
      pen.fillStyle = css("--text");
      pen.font = "600 12px system-ui, sans-serif";
      pen.fillText(rank.name, 0, rank.top + 12);
    }
    if (gutter < 100) return;
    pen.fillStyle = css("--faint");
    pen.textAlign = "right";
    for (const { row, top, height: rowHeight } of rows) {
      pen.font = `${Math.min(11, rowHeight - 1)}px system-ui, sans-serif`;
      pen.fillText(row.label, gutter - 8, top + rowHeight / 2 + 4);
    }
  }

  function draw() {
    layout();
    colours = line.kinds.map((_, index) => css(`--k${index}`));
    const pen = sharp(canvas, width, height);
    drawn = 0;
    drawAxis(pen);
    pen.save();
    pen.beginPath();
    pen.rect(gutter, 0, width - gutter, height);
    pen.clip();
    rows.forEach((row) => drawRow(pen, row));
    pen.restore();
    drawLabels(pen);
  }

  function show(low, high) {
    const least = 2, most = last - first + 2 * margin;
    let span = Math.min(Math.max(high - low, least), most);
    low = Math.min(Math.max(low, first - margin), last + margin - span);
    view = [low, low + span];
    requestAnimationFrame(draw);
  }
  function zoom(factor, x) {
    const at = toTime(x === undefined ? (gutter + width) / 2 : x);
    show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }
  const fit = () => show(first - margin, last + margin);
  const move = (share) => show(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));

  function sliceAt(x, y) {
    const found = rows.find((one) => y >= one.top && y <= one.top + one.height);
    if (!found || x < gutter) return null;
    const slack = (2 * (view[1] - view[0])) / (width - gutter);
    const slices = found.row.slices, at = toTime(x);
    const index = firstAfter(slices, at - slack);
    return index < slices.length && slices[index][0] <= at + slack ? { found, slice: slices[index] } : null;
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = sliceAt(x, y);
    tip.hidden = !hit;
    if (!hit) return;
    const [begin, duration, name, , remark] = hit.slice;
    const lines = [`${hit.found.rank.name}: ${line.names[name]}`, `${timeText(duration)}, from ${timeText(begin)} on`];
    if (remark >= 0) lines.push(line.names[remark]);
    tip.textContent = lines.join("\n");
    tip.style.left = `${Math.max(0, Math.min(x + 14, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  const fingers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return point(event);
    const before = fingers.get(event.pointerId), others = [...fingers.entries()].filter(([id]) => id !== event.pointerId);
    if (others.length) {
      const still = others[0][1], was = Math.abs(before - still), is = Math.abs(event.clientX - still);
      if (was > 8 && is > 8) zoom(was / is, still - canvas.getBoundingClientRect().left);
    } else {
      move((before - event.clientX) / (width - gutter));
    }
    fingers.set(event.pointerId, event.clientX);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", fit);
  canvas.addEventListener("wheel", (event) => {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!event.ctrlKey && !event.metaKey && !isSideways) return; // the page scrolls
    event.preventDefault();
    if (isSideways) move((event.deltaX || event.deltaY) / 800);
    else zoom(Math.exp(event.deltaY / 240), event.clientX - canvas.getBoundingClientRect().left);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const actions = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fit,
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
  const commands = { in: () => zoom(0.5), out: () => zoom(2), fit };
  document.querySelectorAll("[data-do]").forEach((button) => { button.onclick = commands[button.dataset.do]; });
  return { draw, show };
})();

function drawAll() {
  drawLoad();
  if (chart) chart.draw();
}
drawAll();
window.addEventListener("resize", drawAll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
