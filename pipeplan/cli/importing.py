"""``pipeplan import``: what is what somebody runs today worth, and what would change it?"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..api.asked import Common, Planning, words
from ..choices import DRAINED
from ..errors import BadInput, InvalidPlan
from .grouped import GroupedCommand
from .options import FILE, JSON, PROFILE, asking, option_of, options, refuse_two_documents, time_limit
from .progress import status

if TYPE_CHECKING:
    from ..files.frameworks import Imported
    from ..problem import Policy

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
    from ..api.problems import problem_of
    from ..api.profiles import read_profile
    from ..api.tensor import parts
    from ..files.frameworks import READERS, Source, parsed_renames, read_options
    from ..files.plans import plan_text
    from ..files.text import write_text
    from ..planner.periodic.incumbent import Settings
    from ..planner.what_if.target import judge
    from ..report.tables.plan import print_plan
    from ..report.tables.searches import judged_figures, print_change

    said = read_options(arguments)
    deadline = shared.pop("deadline")
    whole, degree = read_profile(shared.pop("profile")), said.count(READERS[name].tensor, 1)
    given = {**shared, "weights": DRAINED, "batch": "any", "deadline": deadline}
    problem, assumed = problem_of(parts(whole, degree)[0], **given)
    others = []
    for part in parts(whole, None):
        with suppress(BadInput):  # where groups of so many cross servers
            others += [problem_of(part, **given)[0]] * (part.chain.tensor != degree)
    found = READERS[name](Source(said, problem.chain, len(problem.platform), parsed_renames(rename)))
    policy, about = _as_said(problem.policy, found), status()
    try:
        judged = judge(
            problem.with_policy(policy),
            name,
            found.stages,
            found.kind,
            Settings(progress=about.improved, status=about),
            effort or "normal",
            [other.with_policy(policy) for other in others],
        )
    except InvalidPlan as error:
        raise InvalidPlan([f"{arguments}: {sentence}" for sentence in error.violations]) from error
    for path, planned in {output: judged.today, best: judged.best}.items():
        if path is not None:
            write_text(path, plan_text(planned.plan, planned.evaluation))
    if as_json:
        click.echo(json.dumps(judged_figures(judged, name), indent=1))
    elif "-" not in (output, best):
        print_plan(judged.today.plan, [*assumed, *found.notes], result=judged.today.evaluation)
        print_change(judged, name)


def _as_said(policy: Policy, found: Imported) -> Policy:
    """Return how the arguments keep weights, where no option says otherwise."""
    context, said = click.get_current_context(), {name: getattr(found, name) for name in POLICY}
    unsaid = {x for x in said if context.get_parameter_source(x) is ParameterSource.DEFAULT}
    changed: dict[str, Any] = {name: value for name, value in said.items() if value is not None and name in unsaid}
    return replace(policy, accumulate=found.microbatches, **changed)
