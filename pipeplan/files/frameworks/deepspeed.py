"""Which PipelineModule gives a plan's stages to DeepSpeed?"""

from __future__ import annotations

from ...version import __version__
from .asked import Asked

CONFIG = '''"""Stages of {model} for DeepSpeed, planned by pipeplan {version}.

    {ranks} stages x {pipelines} pipelines, {microbatches} microbatches of {each} samples for each pipeline and update.
"""

{imported}CONFIG = {{
    "train_batch_size": {batch},
    "train_micro_batch_size_per_gpu": {each},
    "gradient_accumulation_steps": {microbatches},{more}
}}
'''
PIPELINE = '''PARTS = {parts}  # where the layers of each stage begin, and where they end; the loss is loss_fn


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule with the stages of the plan; no partition_method of DeepSpeed takes them."""

    def _partition_layers(self, method="planned"):
        stages, layers = self._topo.get_dim("pipe"), self._num_layers
        if (stages, layers) != (len(PARTS) - 1, PARTS[-1]):
            planned = f"{{len(PARTS) - 1}} stages of {{PARTS[-1]}} layers"
            raise ValueError(f"planned for {{planned}}; these are {{stages}} of {{layers}}")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


def planned(layers, loss_fn, **options):
    """Return the pipeline of ``layers``, a list or an nn.Sequential of all but the loss; ``options`` are its own."""
    options = {{"num_stages": {ranks}, "activation_checkpoint_interval": {interval}, **options}}
    return PlannedPipelineModule(layers=layers, loss_fn=loss_fn, **options)
'''
ALONE = """# every GPU has all layers: deepspeed.initialize(model=model, config=CONFIG)
"""


def deepspeed(asked: Asked) -> str:
    """Return a Python module with a subclass of ``PipelineModule`` that has the plan's stages, and the configuration:
    batch sizes, and what replicas share. Where they share gradients there is no pipeline and no such class.

    One stage per rank, in order. Layers that share weights must be given as ``TiedLayerSpec``.
    """
    found, zero = asked.expressed("deepspeed"), asked.plan.policy.zero
    shape, each = found.shape, asked.plan.chain.microbatch
    ends = [part[-1].modules_stop for part in found.units]
    alone = zero > 1  # which pipelines there don't go with
    more = f'\n    "torch_autocast": {{"enabled": True, "dtype": "{asked.autocast}"}},' if asked.autocast else ""
    more += f'\n    "zero_optimization": {{"stage": {zero}}},' if zero else ""
    return (CONFIG + (ALONE if alone else PIPELINE)).format(
        model=asked.title,
        version=__version__,
        ranks=shape.ranks,
        pipelines=shape.pipelines,
        microbatches=asked.microbatches // shape.pipelines,
        each=each,
        batch=each * asked.microbatches,
        parts=[0, *ends],
        more=more,
        imported="" if alone else "from deepspeed.pipe import PipelineModule\n\n",
        interval=0 if found.recompute.rule == "none" else found.recompute.count,
    )
