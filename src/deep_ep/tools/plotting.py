"""Pictures: matplotlib is optional, imported only to draw, and never needs a screen."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

INSTALL = "pip install deepep-python[plot]"


def require_matplotlib(command: str) -> None:
    """Fail before anything runs if the picture could not be drawn after it.

    Raises:
        ValueError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{command}: --plot needs matplotlib, which is not installed. {INSTALL}")


def new_figure(width: float, height: float, dpi: int) -> Any:
    """An empty figure; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, whatever matplotlib is set to
    return figure


def write_picture(command: str, figure: Any, path: Path) -> None:
    """Write a figure, as SVG if the file's name says so (the same bytes each time), else as PNG.

    Raises:
        ValueError: The file cannot be written.
    """
    if path.suffix != ".svg":
        write_png(command, figure, path)
        return
    from matplotlib import rc_context

    try:
        with rc_context({"svg.hashsalt": "deep_ep"}):
            figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ValueError(f"{command}: --plot: cannot write {path} ({error.strerror})") from None


def write_png(command: str, figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ValueError(f"{command}: --plot: cannot write {path} ({error.strerror})") from None
