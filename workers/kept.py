"""[P] Counters and histograms of an engine that outlive it: what was counted before a death is counted still.

They look like those of the Prometheus client, whose own live and die with their process. Here each number is a sum in a
store, which may be a file that this engine, its keeper and the next engine have in common (``workers.ledger``). It is
written at once: an engine that is killed has no time left to save anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

_SEPARATOR: Final = "\t"


class Store(Protocol):
    """Sums by name."""

    def add(self, key: str, amount: float) -> None:
        """To a sum that begins at 0."""

    def put(self, key: str, value: float) -> None:
        """In place of what was there."""

    def values(self) -> Mapping[str, float]:
        """All of them, as they are now."""


class Volatile:
    """A store that nobody else has."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, key: str, amount: float) -> None:
        self._values[key] = self._values.get(key, 0.0) + amount

    def put(self, key: str, value: float) -> None:
        self._values[key] = value

    def values(self) -> Mapping[str, float]:
        return self._values


class Observed(NamedTuple):
    """One histogram: its buckets (upper bound as Prometheus writes it, how many observations were not above it), and
    the sum of all observations."""

    buckets: tuple[tuple[str, float], ...]
    sum: float


class Book:
    """All kept metrics of a process, and where they stand."""

    def __init__(self) -> None:
        self.store: Store = Volatile()
        self.counters: list[Counter] = []
        self.histograms: list[Histogram] = []

    def keep_in(self, store: Store) -> None:
        """From now on; what was counted until now is added to what is there."""
        before, self.store = self.store.values(), store
        for key, value in before.items():
            store.add(key, value)

    def counter(self, name: str, documentation: str, labelnames: Sequence[str] = ()) -> Counter:
        """``name`` with its ``_total``."""
        made = Counter(self, name, documentation, labelnames)
        self.counters.append(made)
        return made

    def histogram(
        self, name: str, documentation: str, labelnames: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        """``buckets``: upper bounds, ascending; the infinite one goes without saying."""
        made = Histogram(self, name, documentation, labelnames, buckets)
        self.histograms.append(made)
        return made


class Counter:
    """Built by :meth:`Book.counter`."""

    def __init__(self, book: Book, name: str, documentation: str, labelnames: Sequence[str]) -> None:
        self._book = book
        self.name, self.documentation, self.labelnames = name, documentation, tuple(labelnames)

    def labels(self, *values: str) -> CounterChild:
        return CounterChild(self._book, _key(self.name, self.labelnames, values))

    def inc(self, amount: float = 1.0) -> None:
        """Of a counter without labels."""
        self.labels().inc(amount)

    def samples(self, values: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
        """Values of the labels, and the count. Without labels there always is one."""
        found = dict(_series(self.name, values))
        if not self.labelnames:
            found.setdefault((), 0.0)
        yield from sorted(found.items())


class CounterChild:
    """One series of a counter."""

    def __init__(self, book: Book, key: str) -> None:
        self._book, self._key = book, key

    def inc(self, amount: float = 1.0) -> None:
        """Raises:
        ValueError: ``amount`` is negative.
        """
        if amount < 0:
            raise ValueError("a counter only grows")
        self._book.store.add(self._key, amount)


class Histogram:
    """Built by :meth:`Book.histogram`."""

    def __init__(
        self, book: Book, name: str, documentation: str, labelnames: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._book = book
        self.name, self.documentation, self.labelnames = name, documentation, tuple(labelnames)
        self.bounds: tuple[float, ...] = (*buckets, float("inf"))

    def labels(self, *values: str) -> HistogramChild:
        _key(self.name, self.labelnames, values)
        return HistogramChild(self._book, self, values)

    def observe(self, value: float) -> None:
        """Of a histogram without labels."""
        self.labels().observe(value)

    def samples(self, values: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], Observed]]:
        """Values of the labels, and what was observed."""
        sums = dict(_series(f"{self.name}_sum", values))
        counts: dict[tuple[str, ...], dict[str, float]] = {}
        for (*labels, bound), count in _series(f"{self.name}_bucket", values):
            counts.setdefault(tuple(labels), {})[bound] = count
        if not self.labelnames:
            counts.setdefault((), {})
        for series, found in sorted(counts.items()):
            running = 0.0
            buckets: list[tuple[str, float]] = []
            for bound in map(bound_text, self.bounds):
                running += found.get(bound, 0.0)
                buckets.append((bound, running))
            yield series, Observed(tuple(buckets), sums.get(series, 0.0))


class HistogramChild:
    """One series of a histogram."""

    def __init__(self, book: Book, histogram: Histogram, values: tuple[str, ...]) -> None:
        self._book, self._histogram, self._values = book, histogram, values

    def observe(self, value: float) -> None:
        """The sum first: a count without its sum would be worse than a sum without its count."""
        histogram = self._histogram
        bound = next(bound for bound in histogram.bounds if value <= bound)
        self._book.store.add(_SEPARATOR.join((f"{histogram.name}_sum", *self._values)), value)
        self._book.store.add(_SEPARATOR.join((f"{histogram.name}_bucket", *self._values, bound_text(bound))), 1.0)


def bound_text(bound: float) -> str:
    """A bucket's upper bound as Prometheus writes it."""
    return "+Inf" if bound == float("inf") else repr(float(bound))


def _key(name: str, labelnames: tuple[str, ...], values: Sequence[str]) -> str:
    """Raises:
    ValueError: not the labels that the metric has, or one that cannot be kept.
    """
    if len(values) != len(labelnames) or any(_SEPARATOR in value for value in values):
        raise ValueError(f"{name} has the labels {labelnames}, not {values}")
    return _SEPARATOR.join((name, *values))


def _series(name: str, values: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, value in values.items():
        first, *labels = key.split(_SEPARATOR)
        if first == name:
            yield tuple(labels), value
