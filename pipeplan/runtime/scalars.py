"""What does TensorBoard show of a run? Loss, speed and norm of every update, and at the end the memory of GPUs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .measure.progress import StepProgress, metrics_of
from .measure.report import RunReport

SHOWN = {  # names and units of metrics, where they are others there
    "period_ns": ("ms per microbatch", 1e6),
    "samples_per_s": ("samples per s", 1),
    "learning_rate": ("learning rate", 1),
    "gradient_norm": ("gradient norm", 1),
}


class Scalars:
    """A run's scalars in ``folder``, where files appear with the first of them: of several processes not all have some.

    BadInput where TensorBoard is missing, and for a folder that cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadInput(
                f"--log-dir: TensorBoard cannot be imported ({error}); pip install 'pipeplan[tensorboard]'"
            ) from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--log-dir: {folder} cannot be made: {error.strerror}") from error
        self._folder, self._kind = folder, SummaryWriter
        self._step = 0

    def hear(self, progress: StepProgress) -> None:
        """Write what is known after an update."""
        self._step = progress.step
        for name, value in metrics_of(progress).items():
            shown, unit = SHOWN.get(name, (name, 1))
            self._add(shown, value / unit)

    def finish(self, report: RunReport, step: int) -> None:
        """Write what was measured over the whole run, which ends with update ``step``."""
        self._step = step
        for held in report.activations:
            self._add(f"memory in MB/activations of GPU {held.device}", held.measured_bytes / 1e6)
        for state in report.states:
            self._add(
                f"memory in MB/weights, gradients and optimizer of GPU {state.device}", state.measured_bytes / 1e6
            )
        for gpu in report.memory:
            self._add(f"memory in MB/allocated on GPU {gpu.device}", gpu.measured_bytes / 1e6)

    def close(self) -> None:
        """See that everything is written."""
        if "_writer" in self.__dict__:
            self._writer.close()

    def _add(self, name: str, value: float) -> None:
        self._writer.add_scalar(name, value, self._step)

    @cached_property
    def _writer(self) -> Any:
        return self._kind(str(self._folder))
