"""Under which heading does ``--help`` list an option? One table by names, for all commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

WIDEST = 30  # columns of a name that has its text beside it
FEW = 6  # options of a command that need no headings
OTHERS = "Options"
GROUPS = {  # heading -> options, in the order of --help; what is listed nowhere comes under the command's own heading
    "Model": "model data name granularity blocks microbatch microbatch-profile layer-overhead",
    "Platform": "gpus gpu mem reserve bandwidth network latency overhead platform blocking-transfers tensor "
    "sequence-parallel",
    "Training": "weights accumulate batch samples tokens price optimizer no-decay groups lr scheduler warmup "
    "clip-norm clipped ema delay-correction predicted averaged precision half loss-scale loss-scale-window "
    "vertical-sync no-replicas zero offload bytes-per-parameter checkpointing bucket-size coarsening",
    "Search": "for data-parallel overlap algorithm algorithms option effort solver schedule limit time-limit",
    "A plan that is stated": "split replicas on recompute",
    "Measuring": "host-time",
    "Simulation": "",
    "The order": "",
    "Run": "",
    "Evaluation": "eval-data eval-every eval-batches metrics monitor patience",
    "Checkpoints": "checkpoint checkpoint-every keep-checkpoints resume max-restarts save load",
    "Target": "",
    OTHERS: "",
    "Output": "output best json csv trace text width links all recalibrated debug quiet dry-run verbose help help-all",
}
OWN = {  # command -> its own heading
    "profile": "Measuring",
    "run": "Run",
    "simulate": "Simulation",
    "synthesize": "The order",
    "export": "Target",
    "import": "Target",
}
OURS = {  # command -> options that mean there what its own heading says
    "simulate": "schedule limit batch",
    "synthesize": "limit gpus",
    "run": "schedule limit",
    "profile": "optimizer data",
    "export": "schedule",
}
LONG_RANGE = re.compile(r"; \d+<=x<=\d{5,}|\d+<=x<=\d{5,}(?:; )?")  # says nothing that anyone would not think
EMPTY = re.compile(r"\s*\[\]")


FIRST = {  # command -> what a first user needs, which --help shows; --help-all has the rest
    "plan": "gpus gpu mem bandwidth batch microbatch weights optimizer precision for split output json time-limit",
    "grid": "gpus gpu mem bandwidth network batch microbatch data-parallel optimizer precision output json time-limit",
    "compare": "gpus gpu mem bandwidth batch algorithms weights optimizer precision csv json time-limit",
    "import": "gpus gpu mem bandwidth network from output best optimizer precision json time-limit",
    "run": "model data steps epochs lr optimizer scheduler clip-norm eval-data device checkpoint resume save log-dir "
    "trace dry-run json",
    "simulate": "microbatches schedule batch jitter output trace json",
    "synthesize": "gpus times placement microbatches limit output time-limit json",
    "profile": "microbatch data device estimate dtype optimizer output quiet",
}
EVERY = "pipeplan.every"  # in the meta of contexts: whether all options are shown


def _show_all(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        context.meta[EVERY] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


class GroupedCommand(click.Command):
    """A command whose ``--help`` begins with ``examples`` and has its options under headings, those first that a first
    user needs."""

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.examples = examples
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, hidden=True,
                help="Show all options and exit.",
            )
        )  # fmt: skip

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, and what it does."""
        formatter.write_paragraph()
        for example in self.examples if ctx.meta.get(EVERY) else self.examples[:2]:
            formatter.write(f"  {example}\n")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one column for all headings."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option) and not param.hidden]
        first: set[str] = set() if ctx.meta.get(EVERY) else {*FIRST.get(self.name or "", "").split(), "help"}
        listed = [x for x in params if len(first) < 2 or first & {name.lstrip("-") for name in x.opts}]
        for param in listed:
            record = param.get_help_record(ctx)
            if record is not None:
                rows[OTHERS if len(params) <= FEW else heading(self.name or "", param)].append(_plain(*record))
        if len(listed) < len(params):
            rows["Output"].append(("--help-all", f"Show {len(params) - len(listed)} more options."))
        width = min(WIDEST, max(len(names) for found in rows.values() for names, _ in found))
        for title, found in rows.items():
            if found:
                with formatter.section(title):
                    formatter.write_dl([(names.ljust(width), text) for names, text in found], WIDEST)


def heading(command: str, param: click.Parameter) -> str:
    """Return the heading of an option of a command."""
    names = {name.lstrip("-") for name in param.opts}
    if not names & set(OURS.get(command, "").split()):
        for title, listed in GROUPS.items():
            if names & set(listed.split()):
                return title
    return OWN.get(command, OTHERS)


def _plain(names: str, text: str) -> tuple[str, str]:
    """Return an option's line with numbers as N, and without ranges that are there to keep numbers finite."""
    names = names.replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "X")
    return names, EMPTY.sub("", LONG_RANGE.sub("", text))
