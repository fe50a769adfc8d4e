"""Warnings that name the line of the user."""
import sys
import warnings

INSIDE = {"torchsparsekv", "transformers", "torch"}


def warn(text: str) -> None:
    """Warn at the first caller outside this package, transformers and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"torchsparsekv: {text}", stacklevel=level)
