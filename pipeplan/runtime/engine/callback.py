"""What does a function of the user's hear of a run? Every update, and every evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from ..measure.progress import StepProgress
from ..model.build.spec import find
from ..model.user_code import user_code


def calling(name: str) -> Callable[[StepProgress], None]:
    """Return what calls ``module:function(step, metrics)`` with a dict of numbers; CodeFailed where that raises.

    After an update they are its loss and what else is known of it, after an evaluation its means: ``evaluation/loss``.
    """
    function = find(name)

    def hear(progress: StepProgress) -> None:
        if progress.evaluation is not None:
            numbers = {f"evaluation/{key}": value for key, value in progress.evaluation.items()}
        else:
            known = asdict(progress)
            names = ("loss", "learning_rate", "gradient_norm", "period_ns", "samples_per_s")
            numbers = {key: known[key] for key in names if known[key] is not None}
        with user_code(f"--callback {name}"):
            function(progress.step, numbers)

    return hear
