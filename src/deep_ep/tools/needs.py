"""What a program needs, said in one sentence before it starts anything. The examples use it."""

from __future__ import annotations

import os
from pathlib import Path

from .plotting import require_matplotlib
from .terminal import require_device, require_folder


def require(program: str, *, device: str | None = None, plot: Path | None = None, torchrun: str = "") -> None:
    """End a program that cannot run here, with what is missing.

    Args:
        program: Its name, for the sentence.
        device: The device that was asked for; None: any.
        plot: The picture that will be written; None: none.
        torchrun: The command to start it with, if ranks come from torchrun alone; empty: it starts its own.

    Raises:
        SystemExit: Something is missing.
    """
    try:
        if torchrun and "RANK" not in os.environ:
            raise ValueError(f"{program}: its ranks come from torchrun: {torchrun}")
        require_device(program, device)
        if plot is not None:
            require_matplotlib(program)
            require_folder(program, plot)
    except ValueError as error:
        raise SystemExit(str(error)) from None
