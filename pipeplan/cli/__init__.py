"""What can be asked on the command line? One thin command each, imported only when used, so ``--help`` is instant."""

from __future__ import annotations

import codecs
import gc
import io
import json
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

import click

from ..errors import BadInput, Ended, InvalidPlan, OutputLost, PipeplanError
from ..names import SENTENCE, shown
from ..status import Status
from ..version import __version__
from .showing import STATUS, LiveLine, status

# name -> (module and its click command, one line for --help)
COMMANDS = {
    "plan": ("planning:plan", "Split a profiled network over GPUs and prove the split good."),
    "grid": ("planning:grid", "Plan stages x equal pipelines that share every batch."),
    "check": ("plans:check", "Judge a plan: every rule, every reported figure."),
    "show": ("plans:show", "Draw one period of a plan as a Gantt chart."),
    "simulate": ("plans:simulate", "Run a plan in simulation, under its own schedule or any other."),
    "synthesize": ("synthesize:command", "Find the best order of passes within memory, with a lower bound."),
    "report": ("plans:report", "Write a plan as one self-contained HTML page."),
    "export": ("plans:export", "Write a plan for Megatron-LM, torchtitan, DeepSpeed or torch's pipelining."),
    "import": ("profile:judge_arguments", "Judge today's Megatron-LM or torchtitan arguments, and find better ones."),
    "compare": ("planning:compare", "Put algorithms side by side over GPUs and memories."),
    "run": ("run:command", "Train a model from a plan on torch processes."),
    "profile": ("profile:command", "Measure a torch model layer by layer, or estimate it for a GPU."),
    "estimate": ("planning:estimate", "Estimate memory and training time of a model on GPUs that you name."),
    "calibrate": ("calibrate:command", "Fit the constants of estimates to a few measured iterations."),
    "diff": ("diff:command", "Compare two profiles, and judge a plan of one on the other."),
    "list": ("about:listing", "List the names of GPUs, models, schedules and algorithms."),
    "schema": ("about:schema", "Print the JSON Schema of a file."),
    "doctor": ("doctor:command", "Show what this machine has for planning and training, and what is missing."),
    "completion": ("about:completion", "Print or install shell completion."),
}
EXTRAS = {"torch": "torch", "matplotlib": "plots", "highspy": "highs"}  # package -> the extra that brings it
INTERRUPTED = 130
ESCAPED = "pipeplan-escaped"  # what to do with letters that an output lacks
TRACEBACK = "pipeplan.traceback"  # in the meta of contexts: whether --debug asks for it


class LazyGroup(click.Group):
    """A group whose commands are imported on first use; those with --debug print the traceback of an error too."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named, and show that it lives."""
        ctx.meta[STATUS] = about = Status("")
        try:
            with LiveLine(about):
                return super().invoke(ctx)
        except PipeplanError as error:
            if ctx.meta.get(TRACEBACK):
                traceback.print_exception(error)
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the work, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(f".{module}", __name__), function)
        command.name = cmd_name  # not that of the function
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that was named; a mistyped one ends with those that it may have been."""
        try:
            found = super().resolve_command(ctx, args)
            if os.environ.get("RANK", "0") == "0":  # of several processes one talks
                status().say(found[0] or "")
            return found
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"{error.message}{hint}", error.ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="pipeplan")
def group() -> None:
    """Split a neural network over GPUs for pipeline-parallel training, prove the plan good, simulate it, run it.

    Exit codes: 0 good; 1 invalid, infeasible, or a failed run; 2 usage, or what cannot be read or written; 129, 130,
    143 ended by SIGHUP, SIGINT, SIGTERM; 141 the reader of the output has gone.
    """


def main() -> NoReturn:
    """Run the ``pipeplan`` command; the one place where errors become exit codes."""
    codecs.register_error(ESCAPED, _escaped)
    gc.set_threshold(10**5, 50, 100)  # millions of steps are no garbage: looking takes a fifth of the time
    if isinstance(sys.stdout, io.TextIOWrapper):  # where a letter is lacking it gets its code
        sys.stdout.reconfigure(errors=ESCAPED)
    if isinstance(sys.stdin, io.TextIOWrapper):  # - is a file like others, whatever the terminal speaks
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        code = group.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        _as_text(error).show()
        code = 2
    except PipeplanError as error:
        silent = isinstance(error, OutputLost) and error.reason is None
        for sentence in error.violations if isinstance(error, InvalidPlan) else [str(error)] * (not silent):
            click.echo(f"error: {shown(sentence, SENTENCE)}", err=True)
        code = error.exit_code
    except ImportError as error:
        lacks = _lacking(error)
        if lacks is None:
            raise
        click.echo(f"error: {lacks}", err=True)
        code = BadInput.exit_code
    except MemoryError:
        click.echo("error: this takes more memory than there is; --granularity, or fewer GPUs, take less", err=True)
        code = PipeplanError.exit_code
    except (KeyboardInterrupt, click.Abort) as error:  # click makes one of the other
        by = next((x for x in (error, error.__cause__) if isinstance(x, Ended)), None)
        click.echo("interrupted" if by is None else f"ended by {signal.Signals(by.number).name}", err=True)
        code = INTERRUPTED if by is None else by.exit_code
    gc.freeze()  # or the interpreter, as it ends, looks through all of torch: for seconds on a busy machine
    sys.exit(code if isinstance(code, int) else 0)


def _lacking(error: ImportError) -> str | None:
    """Return what an installation lacks, and what brings it; None where that isn't one of the packages we ask for."""
    name = error.name or ""
    package = name.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in EXTRAS and not sys.modules.get(package):
        return f"this needs {package}: pip install 'pipeplan[{EXTRAS[package]}]'"
    if name.startswith("torch."):  # parts of it that it promises to nobody
        from importlib.metadata import version

        return f"torch {version('torch')} is not one of those tried: {error}; pip install 'pipeplan[torch]' brings one"
    return None


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return letters as JSON escapes them, which a reader of text knows as well."""
    assert isinstance(error, UnicodeEncodeError), "only what is written is escaped"
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


_MEANT = {"tensor": "--tensor", "data-parallel": "--replicas", "pipeline": "--split"}  # by words of frameworks' options


def _as_text(error: click.ClickException) -> click.ClickException:
    """Return an error that quotes what was typed with that as text; others say what click knows, on several lines."""
    quoting = click.BadParameter, click.BadOptionUsage, click.BadArgumentUsage, click.NoSuchOption
    if isinstance(error, click.MissingParameter) or not (isinstance(error, quoting) or type(error) is click.UsageError):
        return error
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        own = {name for x in error.ctx.command.params for name in x.opts}
        for word, meant in _MEANT.items():
            if word in error.option_name and meant in own:
                return click.UsageError(f"{shown(error.message)} Did you mean '{meant}'?", error.ctx)
    return click.UsageError(shown(error.format_message(), SENTENCE), error.ctx)
