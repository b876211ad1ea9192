"""What ranks of the suite find imported: each would spend a tenth of a second, and one that interprets kernels more.

The forkserver imports this once for all ranks of a run. Nothing here may start a thread, or ask for a device.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import pkgutil
import sys
from importlib.util import find_spec

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # of optimizers and custom operators
import torch.distributed.checkpoint.state_dict  # noqa: F401

import common
import deep_ep.engine.cuda.engine
import deep_ep.engine.low_latency.cuda.engine
import deep_ep.kernels
import deep_ep.moe
import deep_ep.tools.soak
import internode  # noqa: F401


def rewrite_kernels() -> None:
    """As Triton's interpreter does at the first call of each: parse it, change it, compile it."""
    from triton.runtime.interpreter import InterpretedFunction

    for module in pkgutil.walk_packages(deep_ep.kernels.__path__, "deep_ep.kernels."):
        importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("deep_ep.kernels."):
            for value in list(vars(module).values()):  # which it adds to
                if isinstance(value, InterpretedFunction):
                    value.rewrite()


common.quicken_interpreter()
if find_spec("triton") is not None and deep_ep.kernels._triton.INTERPRETED:
    rewrite_kernels()
gc.collect()
atexit.register(gc.unfreeze)  # else libraries complain of what is left when the forkserver ends
gc.freeze()  # collections of a rank look at its own objects, and leave pages shared that they would write to
