"""What is in the server from which ranks of tests are forked: beside the command's own, what their models import."""

# ruff: noqa: F401
import gc
import sys
from contextlib import suppress
from pathlib import Path

gc.disable()
sys.path.insert(0, str(Path(__file__).parents[1]))

import cases.crossing
import cases.half
import cases.newest_models
import cases.traced
import cases.training_matrix

with suppress(Exception):  # whatever is wrong with it, the server has to start
    import torch._inductor.sizevars  # what tracing, profiles and files import late
    import torch.profiler._cupti_monitor
    import torch.utils.serialization

with suppress(Exception):
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.qwen3 import modeling_qwen3

gc.freeze()
gc.enable()
