"""``pipeplan import``: what is what somebody runs today worth, and what would change it?"""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from ..api.asked import Common, Planning, words
from .grouped import GroupedCommand
from .options import FILE, JSON, PROFILE, asking, option_of, options, refuse_two_documents, time_limit
from .progress import status

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


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan import profile.json train.sh --from megatron --gpus 8 --mem 80GB",
        "pipeplan import profile.json train.toml --from torchtitan --gpus 8 --gpu h100 --best best.json",
    ),
)
@PROFILE
@asking(Common, without=SAID)
@click.argument("arguments", metavar="ARGUMENTS", type=FILE)
@options(FROM, name={"required": True}, rename={"multiple": True})
@option_of(words(Planning)["effort"])
@options(WRITTEN)
@time_limit("Stop searching for a better plan after this long, such as 30s, with the best so far.")
@JSON
def command(
    arguments: str,
    name: str,
    rename: tuple[str, ...],
    effort: str,
    output: str | None,
    best: str | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Read the plan that ARGUMENTS, a shell script or a part of one, run of the network in PROFILE; and a better one.

    Stages, schedule, batch and recomputation are the arguments'; what they say of optimizer and precision counts where
    no option does. The plan is validated and evaluated like any other, beside the best that the target can express.
    """
    refuse_two_documents(as_json, output=output, best=best)
    if output is not None and output == best:
        raise click.UsageError("--output and --best would both write the same file")
    from ..api.importing import import_plan
    from ..report.tables.searches import judged_figures, print_change

    about, deadline = status(), shared.pop("deadline")
    context = click.get_current_context()
    unsaid = [x for x in POLICY if context.get_parameter_source(x) is ParameterSource.DEFAULT]
    found = import_plan(
        shared.pop("profile"),
        arguments,
        **{key: value for key, value in shared.items() if key not in unsaid},
        framework=name,
        rename=rename,
        effort=effort,
        time_limit=deadline,
        progress=about.improved,
        status=about,
    )
    for path, planned in {output: found.today, best: found.best}.items():
        if path is not None:
            planned.save(path)
    if as_json:
        click.echo(json.dumps(judged_figures(found.judged, name), indent=1))
    elif "-" not in (output, best):
        found.today.show()
        print_change(found.judged, name)
