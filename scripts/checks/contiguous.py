"""Does the exact contiguous search find what trying everything finds? On more instances than the tests have time for.

python scripts/checks/contiguous.py --first 420 --instances 1000
python scripts/checks/contiguous.py --first 36 --instances 200 --segments
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.contiguous import assert_brute_force_agrees, assert_brute_force_agrees_on_segments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--segments", action="store_true", help="recompute any segments, on smaller instances")
    options = parser.parse_args()
    agrees = assert_brute_force_agrees_on_segments if options.segments else assert_brute_force_agrees
    planned = sum(agrees(seed) for seed in range(options.first, options.first + options.instances))
    print(f"{options.instances} instances, {planned} with plans: none is found otherwise")


if __name__ == "__main__":
    main()
