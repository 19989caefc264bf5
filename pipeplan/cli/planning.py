"""``pipeplan plan, grid, estimate, compare``: which plan is best, and what do days of training with it cost?"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, wraps
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..api.asked import Comparing, Grids, Planning
from ..errors import BadInput
from ..names import shown
from ..registry import Late
from ..units import format_bytes
from .options import JSON, MODEL, PROFILE, Count, Named, asking, options, profiles, time_limit
from .showing import new_command, note, print_json, refuse_two_documents, say_written, status

if TYPE_CHECKING:
    from ..api.result import PlanResult
    from ..planner.what_if.compare import OnePlatform

write_text = Late("files.text:write_text")
Command = TypeVar("Command", bound=Callable[..., Any])
MOST = 10**18  # samples, tokens, dollars
NUMBER = re.compile(r"[0-9]{1,19}(\.[0-9]{1,18})?([eE]\+?[0-9]{1,2})?")
PIPELINES = {"default": "auto", "show_default": True}
COLUMNS = "gpus memory_bytes update_samples bound_ns algorithm period_ns claimed_ns seconds data_parallel tensor"
_BILL = options("""
--samples N (samples)         Samples to train on, such as 100e6; prints the training time in days.
--tokens N/LENGTH             Tokens to train on and those of a sample, such as 15e12/8192, for --samples.
--price DOLLARS               What a GPU costs an hour, such as 2.5; prints the cost of the training.
""", samples={"type": click.STRING, "metavar": "N"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bill:
    """A training of so many ``samples``, where a GPU costs ``price`` dollars an hour (None: nobody says)."""

    samples: int
    price: Fraction | None

    @staticmethod
    def of(samples: str | None, tokens: str | None, price: str | None) -> Bill | None:
        """Return what the options ask for, None where that is nothing; BadInput for what they don't say."""
        if samples is not None and tokens is not None:
            raise BadInput("--samples and --tokens both say how long the training is; say one of them")
        if samples is None and tokens is None:
            if price is not None:
                raise BadInput("--price: say how long the training is, by --samples or --tokens")
            return None
        if tokens is None:
            count = int(_number("--samples", samples or "", whole=True))
        else:
            whole, _, each = tokens.partition("/")
            if not each:
                raise BadInput(
                    f"--tokens: '{shown(tokens, 40)}' doesn't say how many tokens a sample has, such as 15e12/8192"
                )
            count = -int(-_number("--tokens", whole, whole=True) // _number("--tokens", each, whole=True))
        return Bill(count, None if price is None else _number("--price", price, whole=False))

    def days(self, samples_per_second: float) -> float:
        """Return the days that the training takes."""
        return self.samples / samples_per_second / 86400

    def dollars(self, samples_per_second: float, gpus: int) -> float | None:
        """Return what that costs on so many GPUs."""
        return None if self.price is None else self.days(samples_per_second) * 24 * gpus * float(self.price)

    def worth(self, samples_per_second: float, gpus: int) -> str:
        """Return days and dollars in words."""
        cost = self.dollars(samples_per_second, gpus)
        return f"{self.days(samples_per_second):.1f} days" + ("" if cost is None else f" and ${cost:,.0f}")

    def line(self, samples_per_second: float, gpus: int, batch: int) -> str:
        """Return the line beside a plan that updates every ``batch`` samples."""
        return (
            f"training    {self.worth(samples_per_second, gpus)} for {self.samples:,} samples, "
            f"{-(-self.samples // batch):,} batches of {batch / samples_per_second:.3f} s"
        )


def billed(command: Command) -> Command:
    """Add the options of a bill; the command is given that as ``bill``."""

    @wraps(command)
    def run(*, samples: str | None, tokens: str | None, price: str | None, **asked: Any) -> None:
        command(bill=Bill.of(samples, tokens, price), **asked)

    return _BILL(run)  # type: ignore[return-value]  # of other arguments


def _number(name: str, text: str, whole: bool) -> Fraction:
    found = Fraction(text) if NUMBER.fullmatch(text) else None
    if found is None or not 0 < found <= MOST or (whole and found.denominator != 1):
        kind, example = ("positive whole number", "100e6") if whole else ("positive number", "2.5")
        raise BadInput(f"{name}: '{shown(text, 40)}' is not a {kind} up to 1e18, such as {example}")
    return found


def _searching(command: Command) -> Command:
    """Add the options of :func:`_search`, and the time limit."""
    limited = time_limit("Stop searching after this time, such as 30s, and keep the best plan so far.")
    output = options("-o, --output OUT  Write the plan as JSON; - is standard output.")
    return limited(output(JSON(command)))


def _search(
    find: Callable[..., PlanResult], output: str | None, as_json: bool, verbose: bool = False, bill: Bill | None = None
) -> PlanResult:
    """Write or show what ``find(progress=, status=)`` finds, ``verbose`` with reasons, and with the ``bill``; return
    it."""
    from ..planner.periodic.incumbent import unsolved

    about = status()
    found = find(progress=about.improved, status=about)
    for words in filter(None, (unsolved(about), *dict.fromkeys(about.notes))):
        note(words)
    text = found.text() if as_json or output is not None else ""
    if output is not None:
        write_text(output, text)
    if as_json and output != "-":
        write_text("-", text)
    elif output != "-":
        found.show(verbose=verbose)
        if bill is not None:
            plan = found.plan
            gpus, batch = len(plan.platform.whole or plan.platform), plan.interval * plan.chain.microbatch
            click.echo(bill.line(found.samples_per_second, gpus, batch))
        say_written(output)
    return found


@new_command(
    "pipeplan plan profile.json --gpus 8 --mem 16GB -o plan.json",
    "pipeplan plan zoo:gpt2-xl --gpus 8 --gpu a100 --microbatch 2 --precision mixed --optimizer adam",
    "pipeplan plan profile.json --gpus 8 --mem 80GB --for megatron --batch 128",
    "pipeplan plan profile.json --gpus 8 --mem 16GB --split 4,4,4,5 --replicas 2,2,2,2 --recompute all",
    "pipeplan plan --resume-from run --gpus 3x8 -o plan.json",
)
@click.argument("profile", metavar="[PROFILE]", type=Named(profiles, files=True), required=False)
@asking(Planning)
@options("-v, --verbose  Print which condition decides the bound on all plans.")
@billed
@_searching
def plan(
    profile: str | None, output: str | None, as_json: bool, verbose: bool, bill: Bill | None, **asked: Any
) -> None:
    """Split the network in PROFILE (JSON, graph.txt, example:NAME; - is standard input) over GPUs.

    PROFILE may also name a model, as pipeplan profile takes it: each layer is then estimated for --gpu.

    Ctrl-C ends the search with the best plan so far.
    """
    if profile is None and asked["resume_from"] is None:
        raise click.UsageError("Missing argument 'PROFILE'.")
    from ..api.planning import plan
    from ..api.plans import own_export

    find = partial(plan, profile, **asked)
    if asked["for_"] is not None and output not in (None, "-"):  # it is there before its price is known
        find = partial(find, on_plan=lambda found: write_text(output, found.text()))
    found = _search(find, output, as_json, verbose, bill)
    if asked["for_"] is not None:
        made = own_export(found.plan, asked["for_"])
        if isinstance(made, str):
            note(f"export will say: {made}")


@new_command(
    "pipeplan grid profile.json --gpus 8 --mem 16GB --batch 64 --microbatch 1,2,4 -o plan.json",
    "pipeplan grid zoo:gpt2-xl --gpus 2x8 --gpu a100 --batch 512 --data-parallel 4 --precision mixed",
)
@PROFILE
@asking(
    Grids,
    batch={"type": Count(), "metavar": None, "required": True, "help": "Samples per update."},
    pipelines=PIPELINES,
)
@_searching
def grid(profile: str, output: str | None, as_json: bool, **asked: Any) -> None:
    """Plan a grid of GPUs for PROFILE: stages x equal pipelines that share every batch, message-driven and drained.

    Every grid of the GPUs is tried, with microbatches of the given sizes. The grid that finishes a batch first is the
    plan; the others are listed with their times, or with why they don't fit.

    Ctrl-C ends the search with the best plan so far.
    """
    from ..api.grids import grid

    _search(partial(grid, profile, **asked), output, as_json)


@new_command(
    "pipeplan estimate zoo:llama-7b --gpus 8 --gpu h100 --samples 100e6",
    "pipeplan estimate zoo:myelin-12b --gpus 48 --gpu v100 --microbatch 8 --batch 16384 --offload",
)
@click.argument("profile", metavar="MODEL", type=MODEL)
@asking(
    Grids,
    without=("platform", "reserve", "latency", "overhead", "blocking_transfers", "granularity", "blocks", "clipped",
             "predicted", "bytes_per_parameter", "checkpointing", "profiles", "layer_overhead", "overlap", "limit",
             "effort"),
    gpus={"required": True},
    batch={"type": Count(), "metavar": None, "help": "Samples per update.  [default: 4 microbatches per GPU]"},
    optimizer={"default": "adam"},
    precision={"default": "mixed", "show_default": True, "help": None},
    pipelines=PIPELINES,
    microbatches={"default": "1", "show_default": True, "help": "Samples of a microbatch: several to choose from."},
)  # fmt: skip
@billed
@JSON
def estimate(profile: str, gpus: tuple[int, ...], bill: Bill | None, as_json: bool, **asked: Any) -> None:
    """Estimate memory and time of training MODEL on GPUs that you name: zoo:NAME, hf:CONFIG or module:function.

    Every layer is estimated for the GPU, the layers are planned on every grid of stages x pipelines, and the fastest
    grid is shown. Exit code 1: nothing fits.
    """
    from ..api.grids import estimate

    found = estimate(profile, status=status(), gpus=gpus, **asked)
    each = found.plan.interval * found.plan.chain.microbatch
    chain = found.plan.chain
    parameters, tensor, width = int(chain.sums.parameters[-1]), chain.tensor, chain.width
    rate = found.samples_per_second
    if as_json:
        figures = {
            "parameters": parameters,
            "tensor": tensor,
            "experts": chain.experts,
            "context": chain.context,
            "batch": each,
            "batch_seconds": each / rate,
            "batch_seconds_within": [x * each / rate for x in chain.within or ()],
            "samples_per_second": rate,
            "samples": None if bill is None else bill.samples,
            "days": None if bill is None else bill.days(rate),
            "dollars": None if bill is None else bill.dollars(rate, prod(gpus)),
            "pipelines": len(found.stages[0].gpus) // width,
            "stages": [{"peak_bytes": x.peak_bytes, "memory_bytes": x.memory_bytes} for x in found.stages],
        }
        print_json(figures)
        return
    found.show()
    whose = f" in each of {width} GPUs that run a layer together" if width > 1 else ""
    click.echo(f"\nparameters  {parameters / 1e9:.3f}e9{whose}; weights that layers share count in each of them")
    if bill is not None:
        click.echo(bill.line(rate, prod(gpus), each))


@new_command(
    "pipeplan compare profile.json --gpus 2,4,8 --mem 8GB,16GB",
    "pipeplan compare profile.json --gpus 4 --mem 16GB --algorithms contiguous,auto --csv rows.csv",
)
@PROFILE
@asking(
    Comparing,
    without=("vertical_sync",),
    gpus={"type": click.STRING, "metavar": "COUNTS", "help": "Numbers of equal GPUs, such as 2-8 or 2,4,8."},
    mem={"help": "Usable memories of each GPU, such as 3GB,4GB."},
    effort={"help": "How many candidates auto tries.  [default: normal]"},
)
@options("--csv OUT (csv_file)  Write the rows as CSV; - is standard output.")
@billed
@time_limit("Stop after this long, such as 600s, with the cases that are done.")
@JSON
def compare(profile: str, csv_file: str | None, as_json: bool, bill: Bill | None, **asked: Any) -> None:
    """Compare algorithms on PROFILE for --gpus such as 2-8 or 2,4,8 and --mem such as 3GB,4GB."""
    from ..api.comparing import compare

    refuse_two_documents(as_json, csv=csv_file)
    found = compare(profile, status=status(), **asked)
    if len(found.rows) < found.total:
        click.echo(f"the time limit ended it after {len(found.rows)} of {found.total} cases", err=True)
    if csv_file is not None:
        write_text(csv_file, _csv(found.rows))
    if as_json:
        print_json([dataclasses.asdict(row) for row in found.rows])
    elif csv_file != "-":
        found.show()
        if bill is not None:
            click.echo(_bills(bill, found.rows, found.problem.chain.microbatch))


def _bills(bill: Bill, rows: Sequence[OnePlatform], each: int) -> str:
    """Return what training takes with the best plan of every platform, in a line."""
    parts = [
        f"{row.gpus} GPU{'s' if row.gpus > 1 else ''} of {format_bytes(row.memory_bytes)} "
        + ("nothing fits" if row.best_ns is None else bill.worth(each * 1e9 / row.best_ns, row.gpus))
        for row in rows
    ]
    return f"training    of {bill.samples:,} samples: {'; '.join(parts)}"


def _csv(rows: Sequence[OnePlatform]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS.split())
    for row in rows:
        for cell in row.cells:
            writer.writerow(
                [row.gpus, row.memory_bytes, row.update_samples, row.bound_ns, *dataclasses.astuple(cell), row.tensor]
            )
    return out.getvalue()
