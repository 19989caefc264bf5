"""``pipeplan profile, import``: what does each layer of a torch model cost, on this machine or on a GPU that isn't
here? And what is what somebody runs of a profile today worth, and what would change it?
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from ..api.asked import Common, Parts, Planning, words
from ..choices import ENGINES, USUAL_ENGINE, Effort, TargetName
from ..names import shown
from .options import DEBUG, FILE, GPU, JSON, MODEL, PROFILE, Count, asking, option_of, options, time_limit
from .showing import new_command, note, print_json, refuse_two_documents, say_written, status

WORDS = words(Common)
DTYPES = ("float32", "bfloat16", "float16", "float64", "autocast-bfloat16", "autocast-float16")

MEASURED = f"""
--microbatch N = 8          Samples that run together.
--data MODULE:FUNCTION      data(index, seed) -> (input, target), or a loader, to measure with.
--steps N = 10              Measured steps after warm-up.
--seconds X = 30            Begin no further step after that time; one is measured in any case.
--device auto|cpu|cuda = auto
    Where to measure; auto: on a GPU if torch sees any.
--estimate GPU
    Estimate for a GPU instead (a100, h100, v100, rtx4090, .. or FILE.json): no GPU and no memory needed.
--dtype {"|".join(DTYPES)}
    Convert the model and its input, or run it under torch.autocast.  [default: as built]
"""
ALONE = """
--split-backward            Tell the gradients of weights and of inputs apart.
--hold auto|all|one = auto
    Have all layers on the device at once, or one at a time; auto: one where all don't fit.
--beside COUNT = 1
    Measure on the CPU as one of N processes that train the model at once, as they will in a run.
--in-flight COUNT = 1
    Hold N microbatches between their forwards and their backwards, as stages of a pipeline do.
"""


@new_command(
    "pipeplan profile zoo:gpt-tiny --microbatch 8 -o profile.json",
    "pipeplan profile zoo:llama-7b --microbatch 1 --estimate h100 --dtype bfloat16 -o profile.json",
)
@click.argument("model", metavar="MODEL", type=MODEL)
@options(MEASURED, estimate=GPU)
@option_of(WORDS["optimizer"], help="To time.")
@options(ALONE, beside={"type": Count(), "metavar": "N"}, in_flight={"type": Count(), "metavar": "N"})
@option_of(WORDS["granularity"])
@option_of(WORDS["blocks"])
@asking(Parts)
@options("--tensor-plan MODULE:FUNCTION Which matrices module:function splits, as in run.")
@options("--name TEXT Name in the profile.  [default: MODEL's]", name={"metavar": None})
@options("-o, --output OUT = - Where to write the profile.")
@DEBUG
@options("-q, --quiet  No progress and no table of the layers on standard error.")
def command(
    model: str,
    estimate: str | None,
    engine: str | None,
    tensor_plan: str | None,
    output: str,
    quiet: bool,
    **asked: Any,
) -> None:
    """Measure MODEL layer by layer: zoo:NAME, zoo:NAME,option=value, hf:CONFIG,option=value or module:function."""
    from ..api.given.profiling import profile

    if tensor_plan is not None:
        model += f",tensor_plan={tensor_plan}"
    if estimate is not None and not quiet:
        from ..files.machines.accelerators import accelerator
        from ..runtime.profiler.estimate import said_host_time

        gpu = accelerator(estimate)
        link = f" --bandwidth {shown(gpu.link)}" if gpu.link else ""
        limits = f"--mem {shown(gpu.memory)} --reserve auto{link}"
        click.echo(f"{shown(gpu.name)}: to plan for it, {limits} at most", err=True)
        named = engine or gpu.host_time or USUAL_ENGINE
        said = said_host_time(gpu.constants(engine))
        click.echo(f"{named}: {said} (--engine)" if named in ENGINES else said, err=True)
    if quiet:
        status().say("")
    silent = dict.fromkeys(("say", "note"), lambda words: None)
    heard = silent if quiet else {"say": status().say, "note": partial(click.echo, err=True)}
    found = profile(model, gpu=estimate, engine=engine, **heard, **asked)
    if not quiet and found.measured is not None:
        from ..report.tables.measurements import print_measurements

        print_measurements(found.measured, found.chain)
    for told in found.notes:
        note(told)
    found.save(output)
    say_written(output, f"{len(found)} layers ")


FROM = r"""
--from megatron|torchtitan (name) The framework of the arguments.
--rename PATTERN=NAME,..
    torchtitan: what it calls the profile's layers, as in export: 'block(\d+)=layers.\1,head=lm_head'.
"""
WRITTEN = """
-o, --output OUT    Write the plan that is run today; - is standard output.
--best OUT          Write the best plan that was found for the target.
"""
SAID = ("batch", "checkpointing")  # by the arguments
POLICY = ("optimizer", "precision", "zero")  # which arguments may say, too


@new_command(
    "pipeplan import profile.json train.sh --from megatron --gpus 8 --mem 80GB",
    "pipeplan import profile.json train.toml --from torchtitan --gpus 8 --gpu h100 --best best.json",
)
@PROFILE
@asking(Common, without=SAID)
@click.argument("arguments", metavar="ARGUMENTS", type=FILE)
@options(FROM, name={"required": True}, rename={"multiple": True})
@option_of(words(Planning)["effort"])
@options(WRITTEN)
@time_limit("Stop searching for a better plan after this long, such as 30s, with the best so far.")
@JSON
def judge_arguments(
    arguments: str,
    name: TargetName,
    rename: tuple[str, ...],
    effort: Effort | None,
    output: str | None,
    best: str | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Read the plan in ARGUMENTS, a shell script or a part of one, for the network in PROFILE, and find a better one.

    Stages, schedule, batch and recomputation are the arguments'. So are optimizer and precision, unless an option
    sets them. The plan is validated and evaluated like any other, beside the best that the target can express.
    """
    refuse_two_documents(as_json, output=output, best=best)
    if output is not None and output == best:
        raise click.UsageError("--output and --best would both write the same file")
    from ..api.comparing import import_plan
    from ..report.tables.searches import judged_figures, print_change

    about = status()
    context = click.get_current_context()
    unsaid = [x for x in POLICY if context.get_parameter_source(x) is ParameterSource.DEFAULT]
    found = import_plan(
        shared.pop("profile"),
        arguments,
        **{key: value for key, value in shared.items() if key not in unsaid},
        framework=name,
        rename=rename,
        effort=effort,
        progress=about.improved,
        status=about,
    )
    for path, planned in {output: found.today, best: found.best}.items():
        if path is not None:
            planned.save(path)
    if as_json:
        print_json(judged_figures(found.judged, name))
    elif "-" not in (output, best):
        found.today.show()
        print_change(found.judged, name)
