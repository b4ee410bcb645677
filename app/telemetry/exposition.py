"""Metrics as plain values, which travel between processes, and as the text that is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.processes.families import Family, Sample

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


def families_of(collectors: CollectorRegistry) -> tuple[Family, ...]:
    """The values of now. When a series began (``_created``) is left out: nobody asks, and it is a third of them."""
    return tuple(
        Family(
            family.name,
            family.documentation,
            family.type,
            tuple(
                Sample(s.name, tuple(s.labels.items()), s.value)
                for s in family.samples
                if not s.name.endswith("_created")
            ),
        )
        for family in collectors.collect()
    )


def exposition(families: Sequence[Family]) -> bytes:
    collectors = CollectorRegistry()
    collectors.register(_Fixed(families))
    return generate_latest(collectors)


class _Fixed(Collector):
    """Families that are what they are."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.meaning, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric
