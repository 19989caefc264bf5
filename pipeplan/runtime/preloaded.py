"""What is in the server from which ranks are forked? All that takes seconds to import, once for all of them."""

import gc

import torch._dynamo  # ranks use it, sooner or later
import torch.distributed.checkpoint  # noqa: F401  # as above

from . import launch  # noqa: F401  # ranks run what is in it

gc.freeze()  # of ranks and of the server, neither of which then looks through all this again as it ends
