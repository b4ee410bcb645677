"""Tell people and metrics what a promotion made of the prefix cache of the engine before."""

from __future__ import annotations

import logging

from workers import metrics
from workers.kv_index import Refusal
from workers.kv_memory import Carried

logger = logging.getLogger(__name__)


def tell(carried: Carried, *, taken: int, blocks: int) -> None:
    """``taken`` of ``blocks`` blocks are in use again."""
    refusal = carried.refusal
    metrics.record_carry_over("taken_over" if refusal is None else refusal.value, blocks=taken)
    if refusal is None:
        logger.info("prefix cache: %d of %d blocks taken over", taken, blocks)
        return
    level = logging.WARNING if refusal in (Refusal.FAULT, Refusal.DAMAGED) else logging.INFO
    more = f": {carried.detail}" if carried.detail else ""
    logger.log(level, "prefix cache: it starts empty: %s%s", refusal.sentence, more)
