"""Do commands say what they said of what they refuse? Beside ``printed/refused.txt``."""

from pathlib import Path

from cases.printed import check_printed, printed

REFUSED = """
plan
plna a.json
plan a.json --gpus 2 --mem 1GB -O speed
plan a.json --gpus 2 --mem 1GB -O solver=none
plan a.json --gpus x --mem 1GB
plan a.json --gpus 0 --mem 1GB
plan a.json --gpus 2 --mem 5
plan a.json --gpus 2 --mem 1GB --samples 5 --tokens 5/1
plan a.json --gpus 2 --mem 1GB --samples 1.5
plan a.json --gpus 2 --mem 1GB --samples 0
plan a.json --gpus 2 --mem 1GB --samples 1e19
plan a.json --gpus 2 --mem 1GB --tokens 5
plan a.json --gpus 2 --mem 1GB --tokens 1.5/2
plan a.json --gpus 2 --mem 1GB --price 5
plan a.json --gpus 2 --mem 1GB --samples 5 --price x
plan a.json --gpus 2 --mem 1GB -o none/plan.json
plan none.json --gpus 2 --mem 1GB
compare a.json --gpus 2 --mem 1GB --csv - --json
compare a.json --gpus 4-2 --mem 1GB
check
check plan.json --semantics lazy
check train.sh
simulate plan.json --text --json
simulate plan.json --schedule all --text
simulate plan.json --schedule 1f1b --schedule gpipe --trace t.json
simulate plan.json --seed 3
simulate plan.json --trace - --json
simulate plan.json --jitter 5
simulate plan.json --jitter 500%
simulate plan.json --jitter x%
simulate plan.json --jitter 100.5%
simulate plan.json --jitter -1%
simulate plan.json --width 39
simulate plan.json --width 10001
simulate plan.json --microbatches 0
simulate plan.json --microbatches 1000001
simulate plan.json --jitter 5% --seed -1
run zb.json --dry-run --lr -1
run zb.json --dry-run --lr nan
run zb.json --dry-run --lr inf
run zb.json --dry-run --clip-norm 0
run zb.json --dry-run --limit 0
run zb.json --dry-run --coarsening 0
run zb.json --dry-run --link-delay 1
plan a.json --gpus 4097 --mem 1GB
plan a.json --gpus 2x3x4 --mem 1GB
plan a.json --gpus 2 --mem 1GB --zero 4
plan a.json --gpus 2 --mem 1GB -O effort=9
simulate plan.json --schedule nf1b --microbatches 7
simulate driven.json --schedule pattern
export segments.json --to torch-csv
plan a.json --gpus 2 --mem 1GB --weights stash --schedule nf1b
plan a.json --gpus 2 --mem 1GB --limit 3
plan a.json --gpus 2 --mem 1GB --vertical-sync
synthesize plan.json --gpus 2
synthesize --gpus 2 --times 1,2,3 --microbatches 2 --chunks 2
synthesize --gpus 2 --times 1,2 --microbatches 2
synthesize --gpus 2 --times 1,2,3 --microbatches 2 --limit 1
simulate plan.json --schedule nothing
import gpt.json train.sh --from megatron --gpus 4 --mem 1GB -o x.json --best x.json
import gpt.json train.sh --from megatron --gpus 4 --mem 1GB -o - --json
import gpt.json train.sh --from torchtitan --gpus 4 --mem 1GB
diff a.json b.json --recalibrated c.json
diff run.json trace.json --recalibrated - --json
diff plan.json trace.json
run zb.json --dry-run --steps 1 --epochs 2
run zb.json --dry-run --epoch-length 5
run zb.json --dry-run --eval-every 3
run zb.json --bracket --evaluate
run zb.json --against flush --resume
run zb.json --against plan.json
run zb.json --log-dir x --evaluate
run zb.json --dry-run --limit 3
run zb.json --dry-run --timeout 0s
run zb.json --dry-run --metrics loss,,x
run zb.json --dry-run --no-decay "a, b"
export plan.json --to torch-csv --schedule nothing
export plan.json --to nothing
export zb.json --to torchtitan --schedule 1f1b --rename block
export zb.json --to torchtitan --schedule 1f1b --rename (=b
profile zoo:gpt-tiny --microbatch 2 --estimate a100 --tensor-plan a:b -o x.json
show plan.json -o x.txt
show plan.json --width 0
synthesize
synthesize --gpus 2 --times 1,2
synthesize --gpus 2 --times x
synthesize --gpus 2 --times 1,2,3 --microbatches 2 -o - --json
report none.json -o page.html
calibrate a.json --gpu a100 --measured none.csv
calibrate a.json --gpu a100
list nothing
schema nothing
"""


def test_what_is_refused_is_said_as_is_kept(command_files: Path) -> None:
    told = (f"{words}: {printed(words, command_files)}" for words in REFUSED.split("\n")[1:-1])
    check_printed("".join(told), "refused")
