"""[P] Exit codes of the gateway."""

from __future__ import annotations

from typing import Final

DRAINED: Final = 0
BAD_CONFIGURATION: Final = 2
OVERRAN: Final = 70
"""Shutdown overran, or a second signal."""
