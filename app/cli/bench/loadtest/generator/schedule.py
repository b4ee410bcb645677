"""Sends a scenario's requests when they are due. Nothing waits for an answer but its own greenlet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import gevent
import msgspec
from gevent.pool import Pool

from app.cli.bench.chaos.answers import request_body
from app.cli.bench.chaos.plan import Manner
from app.cli.bench.loadtest.arrivals import Arrival, arrivals
from app.cli.bench.loadtest.asked import Asked, asked
from app.cli.bench.loadtest.generator.client import Client, base_of
from app.cli.bench.loadtest.generator.session import converse
from app.cli.bench.loadtest.hearing import Hearing, tokens_of
from app.cli.bench.loadtest.records import Answered, Began, Ended, Record
from app.cli.bench.loadtest.scenario import Scenario

MARGIN_SECONDS: Final = 5.0
"""After the last answer's time is over."""


class Share(msgspec.Struct, frozen=True):
    """Which requests are this process's: every ``count``-th, from number ``index`` on."""

    index: int
    count: int


class Schedule:
    """One process's share of a run."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        host: str,
        model: str,
        headers: Mapping[str, str],
        share: Share,
        record: Callable[[Record], None],
        answered: Callable[[Asked, Answered], None],
    ) -> None:
        """``record`` gets everything, ``answered`` each answer."""
        self._scenario = scenario
        self._base = base_of(host)
        self._model = model
        self._headers = headers
        self._share = share
        self._record = record
        self._answered = answered
        self._client = Client(self._base, headers)
        self._out = Pool()
        self._sent = self._unsent = self._most = 0

    def run(self) -> None:
        """Until the last answer came, or its time was over."""
        began, processor = time.monotonic(), time.process_time()
        self._record(Began(at=began))
        try:
            for arrival in arrivals(self._scenario):
                if arrival.number % self._share.count == self._share.index:
                    self._send(arrival, began)
            self._out.join(timeout=self._scenario.timeout_seconds + MARGIN_SECONDS)
        finally:
            self._out.kill()
            self._client.close()
        self._record(
            Ended(
                sent=self._sent,
                unsent=self._unsent,
                most_outstanding=self._most,
                seconds=time.monotonic() - began,
                processor_seconds=time.process_time() - processor,
            )
        )

    def _send(self, arrival: Arrival, began: float) -> None:
        what = asked(self._scenario, arrival.number)
        body = b""
        if what.question.manner is not Manner.REALTIME:
            body = msgspec.json.encode(request_body(what.question, self._model))
        due = began + arrival.at
        gevent.sleep(max(0.0, due - time.monotonic()))  # 0, when it is late: answers have their turn, too
        if len(self._out) >= self._scenario.most_outstanding:
            self._unsent += 1
            return
        self._sent += 1
        self._out.spawn(self._one, arrival, what, body, due)
        self._most = max(self._most, len(self._out))

    def _one(self, arrival: Arrival, what: Asked, body: bytes, due: float) -> None:
        sent = time.monotonic()
        told = Answered(number=arrival.number, phase=arrival.phase, late=max(0.0, sent - due), sent_at=time.time())
        hearing = Hearing(sent)
        seconds = self._scenario.timeout_seconds
        if what.question.manner is Manner.REALTIME:
            said = converse(
                self._client, self._base, self._headers, what.question, self._model, hearing, seconds=seconds
            )
            told.status, told.broken, told.said, told.tokens = said.status, said.broken, said.texts, said.tokens
        else:
            response = self._client.ask(what.question, body, hearing, seconds=seconds)
            told.status, told.retry_after = response.status, response.retry_after
            told.broken, told.left, told.body = response.broken, response.left, response.body
            told.tokens = tokens_of(told.body, hearing.events)
        told.total, told.done_at = time.monotonic() - sent, time.time()
        if what.question.manner is not Manner.SLOW:  # its pauses are its own
            told.first, told.gaps = hearing.first, hearing.gaps.tobytes()
        self._record(told)
        self._answered(what, told)
