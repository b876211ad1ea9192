"""Recording what a rank does, in the trace format of Chrome and Perfetto (`docs/trace.md`).

Every rank writes its own file, on the clock of rank 0. Where nothing is recorded there is no `Trace`, and code that
could record something looks at one attribute.
"""

from .clock import Clock
from .meeting import open_trace
from .recorder import CALL, COMM, DEVICE, NETWORK, NO_SLICE, RECEIVE, SEND, WAIT, Slice, Trace, from_track, to_track

__all__ = [
    "CALL",
    "COMM",
    "DEVICE",
    "NETWORK",
    "NO_SLICE",
    "RECEIVE",
    "SEND",
    "WAIT",
    "Clock",
    "Slice",
    "Trace",
    "from_track",
    "open_trace",
    "to_track",
]
