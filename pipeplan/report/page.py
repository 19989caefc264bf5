"""How does the HTML report look and answer to the mouse? Style and script, inlined so that it opens offline."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5b6875; --line: #d8dee5; --page: #ffffff; --card: #f5f7f9;
  --F: #6ea8fe; --B: #63c08a; --W: #c792d6; --SEND_F: #3cc3d0; --SEND_B: #e0b84c;
  --F2: #2f6fd0; --B2: #2b8a57; --W2: #8f4fa3; --limit: #c0392b; --bar: #4f6d8f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b4; --line: #37424e; --page: #151a20;
  --card: #1d242c; --limit: #ef6a5a; --bar: #8fb0d6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 32px 48px; max-width: 1500px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 16px; }
.card { background: var(--card); border-radius: 8px; padding: 10px 16px; min-width: 150px; }
.card b { display: block; font-size: 19px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 12px 3px 0; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } .left { text-align: left; } .wide { overflow-x: auto; }
.bounds { display: grid; grid-template-columns: max-content 1fr; gap: 4px 12px; align-items: center; }
.bounds .track { position: relative; height: 20px; }
.bounds .fill { height: 100%; background: var(--bar); border-radius: 3px; }
.bounds .fill.plan { background: var(--F2); } .bounds .fill.claimed { opacity: .35; }
.legend span { margin-right: 16px; } .legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px;
  border-radius: 2px; vertical-align: -1px; }
.chart { display: grid; grid-template-columns: max-content 1fr; margin-top: 6px; }
.names div { height: 20px; font-size: 12px; line-height: 20px; padding-right: 8px; text-align: right; }
.scroll { overflow-x: auto; overflow-y: hidden; border-left: 1px solid var(--line); }
.stretch { position: relative; min-width: 100%; } .stretch svg { display: block; width: 100%; }
.axis { position: relative; height: 20px; border-top: 1px solid var(--line); color: var(--soft); font-size: 11px; }
.axis span { position: absolute; padding-left: 3px; border-left: 1px solid var(--line); white-space: nowrap; }
rect.F { fill: var(--F); } rect.B { fill: var(--B); } rect.W { fill: var(--W); }
rect.SEND_F { fill: var(--SEND_F); } rect.SEND_B { fill: var(--SEND_B); }
rect.F.later { fill: var(--F2); } rect.B.later { fill: var(--B2); } rect.W.later { fill: var(--W2); }
rect.op:hover { stroke: var(--ink); stroke-width: 1.5; }
text { font-size: 11px; fill: #10161c; pointer-events: none; text-anchor: middle; dominant-baseline: central; }
text.later { fill: #fff; }
.memory { display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 14px 18px; }
.memory figcaption { font-size: 12px; } .memory figure { margin: 0; }
.memory svg { width: 100%; height: 84px; background: var(--card); display: block; border-radius: 4px; }
.memory .held { fill: var(--F); fill-opacity: .55; stroke: var(--F2); stroke-width: 1;
  vector-effect: non-scaling-stroke; }
.memory .static { fill: var(--bar); fill-opacity: .35; }
.memory .limit { stroke: var(--limit); stroke-dasharray: 5 4; stroke-width: 1.3; vector-effect: non-scaling-stroke; }
.over { color: var(--limit); font-weight: 600; }
#tip { position: fixed; display: none; background: var(--ink); color: var(--page); padding: 6px 10px;
  border-radius: 5px; font-size: 12px; pointer-events: none; white-space: pre-line; z-index: 9; }
"""

SCRIPT = """
const tip = document.getElementById('tip');
const kinds = {F: 'forward', B: 'backward', W: 'weight gradient', SEND_F: 'activation sent', SEND_B: 'gradient sent'};
const ms = ns => (ns / 1e6).toFixed(3) + ' ms';
function show(text, event) {
  tip.textContent = text; tip.style.display = 'block';
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
  tip.style.left = left + 'px'; tip.style.top = top + 'px';
}
function describe(rect) {
  const [kind, stage, microbatch, start, length] = rect.dataset.op.split(',');
  const row = rect.closest('.chart').dataset.rows.split('|')[rect.dataset.row];
  return `${kinds[kind]} of microbatch ${microbatch}, stage ${stage}\\n${row}\\n` +
    `${ms(+start)} to ${ms(+start + +length)} (${ms(+length)})`;
}
document.addEventListener('mousemove', event => {
  const rect = event.target.closest && event.target.closest('rect.op');
  const memory = event.target.closest && event.target.closest('svg[data-device]');
  if (rect) show(describe(rect), event);
  else if (memory) {
    const box = memory.getBoundingClientRect();
    const data = DATA.memory[memory.dataset.device];
    const at = (event.clientX - box.left) / box.width * DATA.makespan_ns;
    let i = 0;
    while (i + 1 < data.steps.length && data.steps[i + 1][0] <= at) i++;
    const held = data.steps[i][1];
    show(`GPU ${memory.dataset.device} at ${ms(at)}\\n${((data.static + held) / 1e9).toFixed(3)} GB of ` +
      `${(data.limit / 1e9).toFixed(3)} GB\\n${(held / 1e9).toFixed(3)} GB activations`, event);
  } else tip.style.display = 'none';
});
for (const slider of document.querySelectorAll('input[data-zoom]'))
  slider.addEventListener('input', () => {
    document.getElementById(slider.dataset.zoom).style.width = slider.value * 100 + '%';
  });
document.body.dataset.ready = 'yes';
"""
