"""Under which heading does ``--help`` list an option? One table by names, for all commands."""

from __future__ import annotations

import re

import click

WIDEST = 30  # columns of a name that has its text beside it
FEW = 6  # options of a command that need no headings
OTHERS = "Options"
GROUPS = {  # heading -> options, in the order of --help; what is listed nowhere comes under the command's own heading
    "Model": "model data name granularity blocks microbatch microbatch-profile layer-overhead",
    "Platform": "gpus gpu mem reserve bandwidth network latency overhead platform blocking-transfers tensor "
    "sequence-parallel",
    "Training": "weights accumulate batch samples optimizer no-decay groups lr scheduler warmup clip-norm clipped ema "
    "averaged precision half loss-scale loss-scale-window vertical-sync no-replicas zero offload bytes-per-parameter "
    "checkpointing no-checkpointing bucket-size coarsening",
    "Search": "for data-parallel overlap algorithm algorithms option effort gap order solver jobs schedule limit "
    "time-limit",
    "A plan that is stated": "split split-at replicas on recompute",
    "Measuring": "host-time",
    "Simulation": "",
    "The order": "",
    "Run": "",
    "Evaluation": "eval-data eval-every eval-batches metrics monitor patience",
    "Checkpoints": "checkpoint checkpoint-every keep-checkpoints resume max-restarts save load",
    "Target": "",
    OTHERS: "",
    "Output": "output best json csv trace text width links all recalibrated debug quiet dry-run help",
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
LONG_RANGE = re.compile(r"(?:; )?\d+<=x<=\d{5,}")  # says nothing that anyone would not think
EMPTY = re.compile(r"\s*\[\]")


class GroupedCommand(click.Command):
    """A command whose ``--help`` has its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one column for all headings."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        few = sum(not param.hidden for param in params) <= FEW
        for param in params:
            record = param.get_help_record(ctx)
            if record is not None:
                rows[OTHERS if few else heading(self.name or "", param)].append(_plain(*record))
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
