"""Fail when a plan is slower than another: python not_slower.py BEFORE.json AFTER.json [PERCENT]

PERCENT is how much slower it may be; 0 unless said. Exit 1 says that it is slower, in one sentence with the figures.
"""

import sys

import pipeplan as pp

before, after = (1000 / pp.read_plan(path).samples_per_second for path in sys.argv[1:3])  # ms, of valid plans
percent = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
change = 100 * (after / before - 1)
print(f"{before:.3f} ms per sample before, {after:.3f} ms after: {change:+.1f}%")
if change > percent:
    sys.exit(f"the plan got slower by {change:.1f}%, more than the {percent:g}% that are let through")
