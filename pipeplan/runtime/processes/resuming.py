"""Where does a run that resumes begin? At the newest good checkpoint of its folder that is of this training."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import BadInput
from ..engine.job import Job
from ..training.state.checkpoint import Checkpoint, Peers, newest


def resume_point(job: Job, note: Callable[[str], None] | None, peers: Peers) -> Checkpoint | None:
    """Return the checkpoint to go on from, if there is one; ``note`` hears of every damaged one, passed over,
    and of another number of microbatches for an update.

    All ``peers`` look together. BadInput when it is of another model or seed.
    """
    folder, seed = job.options.checkpoint, job.options.seed
    hear = None if note is None else lambda words: note(f"damaged, and passed over: {words}")
    found = None if folder is None else newest(folder, hear, peers)
    if found is not None and found.model != job.plan.chain.name:
        raise BadInput(f"{found.path}: is of model {found.model}; the plan is for {job.plan.chain.name}")
    if found is not None and found.seed != seed:
        raise BadInput(f"{found.path}: was made with seed {found.seed}, which gave its data; this run has {seed}")
    if found is not None and note is not None and not peers.rank and not job.options.evaluates:
        before, now = found.position.microbatch / found.position.step, job.plan.interval
        if before != now:
            note(
                f"the first {found.position.step} updates of this training had {before:g} microbatches each, those of "
                f"this plan have {now}: the rate may want to change with that; --accumulate plans for another number"
            )
    return found
