"""What a program needs, said in one sentence before it starts anything. The examples use it."""

from __future__ import annotations

import os
from pathlib import Path

from .plotting import require_matplotlib
from .terminal import require_device, require_folder, require_positive


def require(
    program: str, *, device: str | None = None, plot: Path | None = None, torchrun: str = "", **positive: float | None
) -> None:
    """End a program that cannot run here, with what is missing.

    Args:
        program: Its name, for the sentence.
        device: The device that was asked for; None: any.
        plot: The picture that will be written; None: none.
        torchrun: The command to start it with, if ranks come from torchrun alone; empty: it starts its own.
        positive: Options that must be greater than 0, by name; None: not given.

    Raises:
        SystemExit: Something is missing.
    """
    try:
        if torchrun and "RANK" not in os.environ:
            raise ValueError(f"{program}: its ranks come from torchrun: {torchrun}")
        require_positive(program, **positive)
        require_device(program, device)
        if plot is not None:
            require_matplotlib(program)
            require_folder(program, plot)
    except ValueError as error:
        raise SystemExit(str(error)) from None
