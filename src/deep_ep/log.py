"""Events of the life of a buffer, for the logger `deep_ep`: ranks are masked, come back, or are replaced."""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("deep_ep")


def log_event(level: int, text: str) -> None:
    """Log an event, if the program has set up logging.

    Without handlers `logging` itself would print warnings, and masks are reported by `warnings` in any case.
    """
    if logger.isEnabledFor(level) and logger.hasHandlers():
        logger.log(level, "%s", text)


def warn(text: str, stacklevel: int) -> None:
    """Warn in a call, and log it.

    A filter that turns warnings into errors (`python -W error`) does not end the call, since the peers are in it: the
    text is only logged then.

    Args:
        text: What to say.
        stacklevel: As in `warnings.warn`.
    """
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        logger.warning("%s", text)
    else:
        log_event(logging.WARNING, text)
