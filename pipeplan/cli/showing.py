"""How does a command show itself? Its help, with options under headings, those first that a first user needs; that it
lives, by one line on standard error: redrawn on a terminal, added elsewhere; and what it tells and writes.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TextIO

import click

from ..names import SENTENCE, shown
from ..status import Status

QUIET_S = 0.7  # what takes less needs no line
EVERY_S = 1.3  # elsewhere than on a terminal: between two
POLL_S = 0.2
STATUS = "pipeplan.status"  # in the meta of contexts


def status() -> Status:
    """Return what the running command says of itself."""
    found: Status = click.get_current_context().meta.setdefault(STATUS, Status(""))  # nobody watches a completion
    return found


def note(words: str) -> None:
    """Tell something beside what the command is for."""
    click.echo(f"note: {shown(words, SENTENCE)}", err=True)


def print_json(found: Any) -> None:
    """Print what a command says with --json."""
    click.echo(json.dumps(found, indent=1))


def say_written(output: str | None, what: str = "", then: str = "") -> None:
    """Say that a file was written, where there is one to say it beside."""
    if output not in (None, "-"):
        click.echo(f"{what}written to {shown(output, SENTENCE)}{then}")


def refuse_two_documents(as_json: bool, **targets: str | None) -> None:
    """Raise UsageError when the files of the options ``targets`` and the JSON would both go to standard output."""
    said = [f"--{name} -" for name, target in targets.items() if target == "-"] + ["--json"] * as_json
    if len(said) > 1:
        raise click.UsageError(f"{' and '.join(said)} would both go to standard output; name a file for one of them")


class LiveLine:
    """Shows a ``status`` and the seconds while a command runs in a ``with`` block.

    A thread reads it, so that also one long integer program or table shows its seconds; the command never waits.
    On a terminal whatever else is written there comes in the line's place; once standard output is, the command is
    done and the line gone. After a search a line says what the time was spent on.
    """

    def __init__(self, status: Status, stream: TextIO | None = None) -> None:
        self.status = status
        self._stream = sys.stderr if stream is None else stream
        self._redrawn = self._stream is not None and self._stream.isatty()
        self._began = self._ticked = self._wrote = time.perf_counter()
        self._spent: dict[str, float] = {}
        self._drawn = False
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LiveLine:
        self._streams = sys.stdout, sys.stderr
        for name, first, there in (("stdout", self.end, True), ("stderr", self.clear, self._redrawn)):
            if there and getattr(sys, name) is not None:
                setattr(sys, name, _Beside(getattr(sys, name), first))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(kind is None)
        self._thread.join()
        sys.stdout, sys.stderr = self._streams

    def tick(self, now: float) -> None:
        """Count the seconds since the last tick to the phase, and write a line if it is time for one."""
        with self._lock:
            phase = self.status.phase
            if isinstance(phase, str):
                self._spent[phase] = self._spent.get(phase, 0.0) + now - self._ticked
            self._ticked = now
            line = self.status.line
            first = self._redrawn or self._wrote == self._began
            due = now - self._began >= QUIET_S if first else now - self._wrote >= EVERY_S
            if due and line and not self._over.is_set():
                self._wrote = now
                self._draw(f"{now - self._began:6.1f} s  {line}")

    def clear(self) -> None:
        """Take the line from the terminal, for something else to be written there."""
        with self._lock:
            if self._drawn:
                self._put("\r\x1b[2K")
                self._drawn = False

    def end(self, well: bool = True) -> None:
        """Show no line any more, but where all went ``well`` one of what a search took."""
        with self._lock:
            if not self._over.is_set():
                self._over.set()
                self.clear()
                if well and self.status.candidates and self._wrote > self._began:
                    self._put(f"{self.spent()}\n")

    def spent(self) -> str:
        """Return what the time was spent on, in words."""
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._spent.items() if seconds >= POLL_S)
        return f"spent on {parts}; {self.status.candidates} candidates"

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self.tick(time.perf_counter())

    def _draw(self, line: str) -> None:
        if self._redrawn:
            self._put(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
            self._drawn = True
        else:
            self._put(f"{line}\n")

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):  # nobody can be told
            self._over.set()


class _Beside:
    """A stream in whose place the line is, or whose reader it would disturb: ``first`` is called before each write."""

    def __init__(self, stream: Any, first: Callable[[], None]) -> None:
        self._stream, self._first = stream, first

    def write(self, text: str) -> int:
        """Write."""
        self._first()
        count: int = self._stream.write(text)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


WIDEST = 30  # columns of a name that has its text beside it
FEW = 6  # options of a command that need no headings
OTHERS = "Options"
GROUPS = {  # heading -> options, in the order of --help; what is listed nowhere comes under the command's own heading
    "Model": "model data name granularity blocks microbatch microbatch-profile layer-overhead",
    "Platform": "gpus gpu engine mem reserve bandwidth network latency overhead platform blocking-transfers tensor "
    "sequence-parallel experts context selective",
    "Training": "weights accumulate batch samples tokens price optimizer no-decay groups lr scheduler warmup "
    "clip-norm clipped ema delay-correction predicted averaged precision half loss-scale loss-scale-window "
    "vertical-sync no-replicas zero offload offload-activations bytes-per-parameter checkpointing bucket-size "
    "coarsening",
    "Search": "for data-parallel overlap algorithm algorithms option effort solver schedule limit time-limit",
    "A plan that is stated": "split replicas on recompute",
    "Measuring": "",
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
        first = "" if ctx.meta.get(EVERY) else FIRST.get(self.name or "", "")
        listed = [x for x in params if not first or {*first.split(), "help"} & {name.lstrip("-") for name in x.opts}]
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


def new_command(*examples: str, cls: type[GroupedCommand] = GroupedCommand) -> Callable[[Any], GroupedCommand]:
    """Return what makes a command of a function, with such ``examples``."""
    return click.command(cls=cls, examples=examples)


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
