"""What is in the server from which ranks are forked? All that takes seconds to import, once for all of them."""

# ruff: noqa: E402, F401
import gc

gc.disable()  # to look for garbage in what is imported would take a fifth of the time

import torch._dynamo  # every optimizer that is made imports it
import torch.export._trace  # modules that are no lists of layers are traced by it

from ..data import loader  # what rows name as well
from ..engine import arrival_order, comparison, held_out
from ..exchange import nearby
from ..measure import report
from ..training.state import state
from ..training.update import bucketed_stepper
from . import launch  # ranks run what is in it

gc.freeze()  # of ranks and of the server, neither of which then looks through all this again as it ends
gc.enable()
