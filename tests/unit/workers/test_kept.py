"""Counters and histograms that stand in a store: as the Prometheus client would have them, and wherever they stand."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ClientHistogram

from workers.kept import Book, Volatile


def test_a_counter_counts_by_labels() -> None:
    book = Book()
    ends = book.counter("ends_total", "Ends", ["how", "where"])
    ends.labels("a", "b").inc()
    ends.labels("a", "b").inc(2.5)
    ends.labels("", "b").inc()
    assert list(ends.samples(book.store.values())) == [(("", "b"), 1.0), (("a", "b"), 3.5)]


def test_without_labels_there_is_a_zero_before_the_first_count() -> None:
    book = Book()
    assert list(book.counter("ends_total", "Ends").samples({})) == [((), 0.0)]
    ((labels, observed),) = book.histogram("times", "Times", buckets=(1.0, 2)).samples({})
    assert labels == ()
    assert observed.buckets == (("1.0", 0.0), ("2.0", 0.0), ("+Inf", 0.0))


@pytest.mark.parametrize("labels", [(), ("a", "b"), ("a\tb",)])
def test_labels_that_do_not_fit_are_a_mistake(labels: tuple[str, ...]) -> None:
    book = Book()
    with pytest.raises(ValueError, match="has the labels"):
        book.counter("ends_total", "Ends", ["how"]).labels(*labels)
    with pytest.raises(ValueError, match="has the labels"):
        book.histogram("times", "Times", ["how"], buckets=(1,)).labels(*labels)


def test_a_counter_does_not_go_down() -> None:
    with pytest.raises(ValueError, match="only grows"):
        Book().counter("ends_total", "Ends").inc(-1)


def test_a_histogram_is_that_of_the_client() -> None:
    bounds = (0.001, 0.5, 1, 10)
    book = Book()
    kept = book.histogram("times", "Times", ["phase"], buckets=bounds)
    registry = CollectorRegistry()
    client = ClientHistogram("times", "Times", ["phase"], buckets=bounds, registry=registry)
    for value in (0.0, 0.001, 0.0011, 0.75, 1.0, 3.0, 11.0, 1e9):
        kept.labels("map").observe(value)
        client.labels("map").observe(value)
    ((labels, observed),) = kept.samples(book.store.values())
    assert labels == ("map",)
    for bound, count in observed.buckets:
        assert registry.get_sample_value("times_bucket", {"phase": "map", "le": bound}) == count
    assert math.isclose(registry.get_sample_value("times_sum", {"phase": "map"}) or 0.0, observed.sum)


def test_what_was_counted_before_there_was_a_store_is_added_to_what_is_there() -> None:
    book, store = Book(), Volatile()
    ends = book.counter("ends_total", "Ends", ["how"])
    store.add("ends_total\ta", 5.0)
    ends.labels("a").inc()
    ends.labels("b").inc()
    book.keep_in(store)
    ends.labels("a").inc()
    assert dict(ends.samples(store.values())) == {("a",): 7.0, ("b",): 1.0}


def test_what_is_there_of_another_version_is_left_alone() -> None:
    book = Book()
    book.store.put("gone_total\tx", 3.0)
    ends = book.counter("ends_total", "Ends", ["how"])
    assert list(ends.samples(book.store.values())) == []
    assert book.store.values()["gone_total\tx"] == 3.0
