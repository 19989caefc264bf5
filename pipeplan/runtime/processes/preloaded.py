"""What is in the server from which ranks are forked? All that takes seconds to import, once for all of them."""

import gc

import torch._dynamo  # noqa: F401  # every optimizer that is made imports it

from ..engine import arrival_order, comparison, held_out  # noqa: F401  # what rows name as well
from ..exchange import nearby  # noqa: F401
from ..measure import report  # noqa: F401
from ..training import split_stage  # noqa: F401
from ..training.state import saved_model  # noqa: F401
from ..training.update import bucketed_stepper  # noqa: F401
from . import launch  # noqa: F401  # ranks run what is in it

gc.freeze()  # of ranks and of the server, neither of which then looks through all this again as it ends
