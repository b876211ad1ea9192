"""Plan a cluster before it is there: bytes, times and tokens per second of expert-parallel calls.

`calls` counts the work of a call, `table` has the constants and predicts, `plan` compares sizes and modes, `layer`
adds attention and expert GEMMs, `validate` says how far off predictions are. `docs/planner.md` explains the model.
"""

from __future__ import annotations

from .calls import Call
from .hardware import CLUSTERS, GPUS, Cluster, Gpu
from .models import MODELS, Model
from .plan import Plan, Question, make_plan
from .routing import Reach, Routing, find_reach
from .table import Prediction, Table, load_table

__all__ = [
    "CLUSTERS",
    "GPUS",
    "MODELS",
    "Call",
    "Cluster",
    "Gpu",
    "Model",
    "Plan",
    "Prediction",
    "Question",
    "Reach",
    "Routing",
    "Table",
    "find_reach",
    "load_table",
    "make_plan",
]
