'use strict';
// Charts of operations over time, drawn from DATA: {charts: {id: {group, rows, batch, start, end, ops}}, memory, ..}.
// An operation is [row, kind, stage, microbatch, start, length, whether of a later stage of its GPU], times in ns.
const ROW = 20, AXIS = 22, LEAST_SPAN = 100, TICK = 90;
const UNITS = [[1e9, 's'], [1e6, 'ms'], [1e3, 'us'], [1, 'ns']];
const WORDS = {
  F: 'forward of microbatch #', R: 'recomputation of microbatch #', B: 'backward of microbatch #', W: 'weight gradient of microbatch #',
  SEND_F: 'activation of microbatch # sent', SEND_B: 'gradient of microbatch # sent', DATA: 'data of microbatch #',
  UPDATE: 'update #', REDUCE: 'sum of gradients for update #', AGREE: 'agreement on update #', SAVE: 'checkpoint #',
};
const PASSES = new Set(['F', 'R', 'B', 'W', 'SEND_F', 'SEND_B', 'DATA']);
const tip = document.getElementById('tip');
const ms = ns => (ns / 1e6).toFixed(3) + ' ms';
let colours = {}, scrolled = -1e9;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ['ink', 'soft', 'line', 'page', 'F', 'R', 'B', 'W', 'SEND_F', 'SEND_B', 'F2', 'R2', 'B2', 'W2', 'UPDATE',
    'OTHER'];
  colours = Object.fromEntries(names.map(name => [name, style.getPropertyValue('--' + name).trim()]));
}

function show(text, event) {
  tip.textContent = text;
  tip.style.display = 'block';
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + 'px';
}

function hide() { tip.style.display = 'none'; }

// The least of 1, 2 or 5 times a power of ten that is `least` or more.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(x => x * power).find(x => x >= least * 0.999999);
}

// Places and names of ticks between two times, `count` of them or fewer.
function ticks(from, to, count) {
  const step = Math.max(1, roundStep((to - from) / Math.max(1, count)));
  const [unit, name] = UNITS.find(([size]) => Math.max(Math.abs(from), Math.abs(to)) >= size) || UNITS[3];
  const decimals = Math.max(0, Math.ceil(Math.log10(unit / step) - 1e-9));
  const found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++)
    found.push([k * step, (k * step / unit).toFixed(decimals) + ' ' + name]);
  return found;
}

// What charts of one time axis show together: the span of time, and the microbatch that is pointed at.
class Group {
  constructor() { this.charts = []; this.microbatch = null; }
  add(chart) {
    this.charts.push(chart);
    this.first = Math.min(...this.charts.map(x => x.data.start));
    this.last = Math.max(...this.charts.map(x => x.data.end));
    this.from = this.first;
    this.to = this.last;
  }
  // Show [from, to), moved inside what there is; false if that is shown already.
  look(from, to) {
    const whole = this.last - this.first, span = Math.max(Math.min(LEAST_SPAN, whole), Math.min(whole, to - from));
    from = Math.min(Math.max(this.first, from), this.last - span);
    if (from === this.from && from + span === this.to) return false;
    this.from = from;
    this.to = from + span;
    this.draw();
    return true;
  }
  zoom(factor, at = (this.from + this.to) / 2) {
    return this.look(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }
  move(share) {
    const by = share * (this.to - this.from);
    return this.look(this.from + by, this.to + by);
  }
  point(microbatch) {
    if (microbatch === this.microbatch) return;
    this.microbatch = microbatch;
    this.draw();
  }
  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.charts.forEach(chart => chart.draw()); });
  }
}

class Chart {
  constructor(box, data, group) {
    this.box = box;
    this.canvas = box.querySelector('canvas');
    this.names = [...box.querySelectorAll('.names div')];
    this.data = data;
    this.group = group;
    this.links = true;
    this.open = new Set();
    this.fingers = new Map();
    this.rows = data.rows.map(() => []);
    for (const op of data.ops) this.rows[op[0]].push(op);
    for (const row of this.rows) row.sort((a, b) => a[4] - b[4] || a[5] - b[5]);
    group.add(this);
    this.listen();
  }
  get shown() {
    return this.data.rows.flatMap(([, link, head], i) =>
      (this.links || !link) && (head === i || this.open.has(head)) ? [i] : []);
  }
  get width() { return this.canvas.clientWidth; }
  time(x) { return this.group.from + x / this.width * (this.group.to - this.group.from); }
  x(time) { return (time - this.group.from) / (this.group.to - this.group.from) * this.width; }
  // The place in `row` of the first operation that ends after `time`.
  after(row, time) {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row[middle][4] + row[middle][5] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }
  of(op, microbatch) {
    const covers = op[1] === 'B' ? this.data.batch : 1;
    return PASSES.has(op[1]) && op[3] - covers < microbatch && microbatch <= op[3];
  }
  label(op) { return String(op[3]); }
  draw() {
    const { canvas, group } = this, scale = devicePixelRatio || 1, shown = this.shown;
    const height = shown.length * ROW + AXIS, width = this.width;
    if (!width) return;
    canvas.style.height = height + 'px';
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext('2d');
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.axis(pen, width, shown.length * ROW);
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.textAlign = 'center';
    pen.textBaseline = 'middle';
    this.labels = [];
    shown.forEach((index, place) => this.row(pen, this.rows[index], place * ROW, width));
  }
  axis(pen, width, bottom) {
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.textAlign = 'left';
    pen.textBaseline = 'top';
    this.ticks = ticks(this.group.from, this.group.to, width / TICK);
    for (const [time, name] of this.ticks) {
      const x = Math.round(this.x(time)) + 0.5;
      pen.strokeStyle = colours.line;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, bottom + 5);
      pen.stroke();
      pen.fillStyle = colours.soft;
      const long = pen.measureText(name).width;
      if (x + long + 3 < width) pen.fillText(name, x + 3, bottom + 6);
    }
    pen.strokeStyle = colours.line;
    pen.strokeRect(0, bottom + 0.5, width, 0);
  }
  row(pen, row, top, width) {
    const { group } = this, first = this.after(row, group.from), seen = {};
    let drawn = -1;
    for (let i = first; i < row.length && row[i][4] < group.to; i++)
      if (PASSES.has(row[i][1])) (seen[row[i][1]] = seen[row[i][1]] || []).push(row[i]);
    // passes of a kind have their numbers if most have room for the longest one of the lane
    const labelled = Object.fromEntries(Object.entries(seen).map(([kind, ops]) => {
      const sizes = ops.map(op => this.x(op[4] + op[5]) - this.x(op[4])).sort((a, b) => a - b);
      const longest = Math.max(...ops.map(op => this.label(op).length));
      return [kind, sizes[sizes.length >> 1] > pen.measureText('0'.repeat(longest)).width + 4];
    }));
    for (let i = first; i < row.length && row[i][4] < group.to; i++) {
      const op = row[i], left = Math.max(0, this.x(op[4])), right = Math.min(width, this.x(op[4] + op[5]));
      const mine = group.microbatch !== null && this.of(op, group.microbatch);
      if (right < drawn + 0.5 && !mine) continue; // a box on the same point as the one before
      drawn = Math.max(drawn, right);
      const size = Math.max(right - left, 0.75);
      const back = group.microbatch !== null && !mine;
      pen.globalAlpha = back ? 0.22 : 1;
      pen.fillStyle = colours[op[1] + (op[6] ? '2' : '')] || colours.OTHER;
      pen.fillRect(left, top + 2, size > 3 ? size - 0.75 : size, ROW - 4);
      const text = this.label(op);
      if (labelled[op[1]] && size > pen.measureText(text).width + 4) {
        pen.globalAlpha = back ? 0.6 : 1;
        pen.fillStyle = back ? colours.soft : op[6] ? '#ffffff' : '#10161c';
        pen.fillText(text, left + size / 2, top + ROW / 2 + 0.5);
        this.labels.push(text);
      }
    }
    pen.globalAlpha = 1;
  }
  // The operation at a point of the canvas, or undefined.
  at(x, y) {
    const index = this.shown[Math.floor(y / ROW)];
    if (index === undefined) return undefined;
    const row = this.rows[index], time = this.time(x), near = (this.group.to - this.group.from) / this.width;
    const found = row[this.after(row, time)];
    if (found && found[4] <= time + near) return found;
    return undefined;
  }
  // The middle of an operation in the window, as events have it.
  place(op) {
    const box = this.canvas.getBoundingClientRect();
    const left = Math.max(op[4], this.group.from), right = Math.min(op[4] + op[5], this.group.to);
    const row = this.shown.indexOf(op[0]);
    return { clientX: box.left + this.x((left + right) / 2), clientY: box.top + row * ROW + ROW / 2 };
  }
  describe(op) {
    const [row, kind, stage, microbatch, start, length] = op;
    const what = (WORDS[kind] || kind + ' #').replace('#', microbatch) + (stage < 0 ? '' : `, stage ${stage}`);
    return `${what}\n${this.data.rows[row][0]}\n${ms(start)} to ${ms(start + length)} (${ms(length)})`;
  }
  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const op = this.at(event.clientX - box.left, event.clientY - box.top);
    if (op) show(this.describe(op), event); else hide();
    this.group.point(op && PASSES.has(op[1]) ? op[3] : null);
  }
  listen() {
    const { canvas, group, fingers } = this;
    this.names.forEach((name, i) => {
      if (!name.dataset.one) return;
      name.addEventListener('click', () => this.fold(i, name));
      name.addEventListener('keydown', event => { if (event.key === 'Enter') this.fold(i, name); });
    });
    const inside = event => event.clientX - canvas.getBoundingClientRect().left;
    const spread = () => {
      const at = [...fingers.values()];
      return at.length > 1 ? Math.max(20, Math.abs(at[0] - at[1])) : 0;
    };
    canvas.addEventListener('wheel', event => {
      if (performance.now() - scrolled < 250) return; // the page is being scrolled, over this chart by chance
      const unit = event.deltaMode ? 16 : 1, sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const changed = sideways
        ? group.move((event.deltaX || event.deltaY) * unit / this.width)
        : group.zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY * unit)) * 0.003), this.time(inside(event)));
      if (changed) event.preventDefault();
    }, { passive: false });
    canvas.addEventListener('pointerdown', event => {
      fingers.set(event.pointerId, inside(event));
      if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
      canvas.classList.add('dragged');
      this.hover(event);
    });
    canvas.addEventListener('pointermove', event => {
      const before = fingers.get(event.pointerId), x = inside(event);
      if (before === undefined) { this.hover(event); return; }
      const wide = spread(), middle = this.time([...fingers.values()].reduce((a, b) => a + b) / fingers.size);
      fingers.set(event.pointerId, x);
      if (wide) group.zoom(wide / spread(), middle);
      else if (group.move((before - x) / this.width)) hide();
    });
    const up = event => { fingers.delete(event.pointerId); canvas.classList.toggle('dragged', fingers.size > 0); };
    canvas.addEventListener('pointerup', up);
    canvas.addEventListener('pointercancel', up);
    canvas.addEventListener('pointerleave', () => { hide(); group.point(null); });
    canvas.addEventListener('dblclick', () => group.look(group.first, group.last));
    canvas.addEventListener('keydown', event => {
      const does = {
        '+': () => group.zoom(0.5), '=': () => group.zoom(0.5), '-': () => group.zoom(2), ArrowLeft: () => group.move(-0.2),
        ArrowRight: () => group.move(0.2), 0: () => group.look(group.first, group.last),
      }[event.key];
      if (does) { does(); event.preventDefault(); }
    });
  }
  showLinks(wanted) {
    this.links = wanted;
    this.arrange();
  }
  // Names stand beside the rows that are shown; replicas of a stage are one until their name is clicked.
  arrange() {
    const shown = new Set(this.shown);
    this.names.forEach((name, i) => { name.style.display = shown.has(i) ? '' : 'none'; });
    this.draw();
  }
  fold(head, name) {
    if (!this.open.delete(head)) this.open.add(head);
    [name.textContent, name.dataset.one] = [name.dataset.one, name.textContent];
    this.arrange();
  }
}

const groups = {}, charts = {};
readColours();
for (const [id, data] of Object.entries(DATA.charts)) {
  const group = groups[data.group] = groups[data.group] || new Group();
  charts[id] = new Chart(document.getElementById(id), data, group);
}
// Charts of one time axis begin at one place, whatever their rows are called.
function align(group) {
  const columns = group.charts.map(chart => chart.box.querySelector('.names'));
  columns.forEach(column => { column.style.width = ''; });
  const width = Math.max(...columns.map(column => column.getBoundingClientRect().width));
  columns.forEach(column => { column.style.width = Math.ceil(width) + 'px'; });
}
const drawAll = () => Object.values(groups).forEach(group => {
  align(group);
  group.charts.forEach(chart => chart.draw());
});
Object.values(charts).forEach(chart => chart.arrange());
for (const box of document.querySelectorAll('input[data-links]')) {
  const mine = Object.values(charts).filter(chart => chart.data.group === box.dataset.links);
  const set = () => mine.forEach(chart => chart.showLinks(box.checked));
  box.addEventListener('change', set);
  set();
}
for (const button of document.querySelectorAll('button[data-zoom]'))
  button.addEventListener('click', () => {
    const group = groups[button.dataset.group], factor = +button.dataset.zoom;
    if (factor) group.zoom(factor); else group.look(group.first, group.last);
  });
for (const svg of document.querySelectorAll('svg[data-device]')) {
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), data = DATA.memory[svg.dataset.device];
    const at = (event.clientX - box.left) / box.width * DATA.makespan_ns;
    let i = 0;
    while (i + 1 < data.steps.length && data.steps[i + 1][0] <= at) i++;
    const held = data.steps[i][1];
    show(`GPU ${svg.dataset.device} at ${ms(at)}\n${((data.static + held) / 1e9).toFixed(3)} GB of ` +
      `${(data.limit / 1e9).toFixed(3)} GB\n${(held / 1e9).toFixed(3)} GB activations`, event);
  });
  svg.addEventListener('pointerleave', hide);
}
addEventListener('scroll', () => { scrolled = performance.now(); hide(); }, { passive: true });
addEventListener('resize', drawAll);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColours(); drawAll(); });
drawAll();
document.body.dataset.ready = 'yes';
