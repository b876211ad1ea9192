"""Events of the life of a buffer, for the logger `deep_ep`: ranks are masked, come back, or are replaced."""

from __future__ import annotations

import logging

logger = logging.getLogger("deep_ep")


def log_event(level: int, text: str) -> None:
    """Log an event, if the program has set up logging.

    Without handlers `logging` itself would print warnings, and masks are reported by `warnings` in any case.
    """
    if logger.isEnabledFor(level) and logger.hasHandlers():
        logger.log(level, "%s", text)
