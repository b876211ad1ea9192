"""One file out of those of all ranks, which Perfetto and Chrome open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from .load import LoadedTrace


def write_merged(trace: LoadedTrace, path: Path) -> None:
    """Write all events of all ranks; compressed if the path ends in `.gz`.

    Raises:
        ValueError: The file cannot be written.
    """
    events = [event for file in trace.files for event in file.events]
    data = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ValueError(f"report: cannot write {path} ({error.strerror})") from None
