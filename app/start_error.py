"""[P] Why the gateway cannot start, as one sentence for whoever started it."""

from __future__ import annotations


class StartError(Exception):
    """The message says what is wrong and what to change. It never holds a secret."""
