"""What is in the server from which ranks are forked? All that takes seconds to import, once for all of them."""

# ruff: noqa: E402, F401
import gc
from importlib import import_module

gc.disable()  # to look for garbage in what is imported would take a fifth of the time

import torch._dynamo  # every optimizer that is made imports it
import torch.export._trace  # modules that are no lists of layers are traced by it

from . import launch  # ranks run what is in it, and what its rows name as well:

for name in ("data.loader", "engine.arrival_order", "engine.comparison", "engine.held_out", "exchange.nearby",
             "measure.report", "training.state.state", "training.update.bucketed_stepper"):  # fmt: skip
    import_module(f"pipeplan.runtime.{name}")

gc.freeze()  # of ranks and of the server, neither of which then looks through all this again as it ends
gc.enable()
