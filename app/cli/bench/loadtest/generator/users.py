"""Locust's side of it: options, statistics, one process or many. The load is the scenario's, whatever the users are.

A run begins with Locust's (``test_start``) and ends it when the schedule is over. With several workers each sends every
so many-th request; the master tells them which, and what the scenario is.

What Locust shows: requests by kind with their total time, and beside them rows that are no requests and not in its
sums: TTFT; ITL, each answer's mean; stall, each one's length; tok/s, of each answer; late, of the generator itself.
"""

from __future__ import annotations

import logging
import os
from array import array
from pathlib import Path
from typing import Any, Final

import gevent
import msgspec
from gevent.event import Event as Flag
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from app.cli.bench.chaos.plan import Manner
from app.cli.bench.loadtest.asked import Asked
from app.cli.bench.loadtest.files import read_scenario
from app.cli.bench.loadtest.generator.client import Client, base_of
from app.cli.bench.loadtest.generator.schedule import Schedule, Share
from app.cli.bench.loadtest.hearing import problem_of
from app.cli.bench.loadtest.records import Answered, Record, RecordWriter
from app.cli.bench.loadtest.scenario import Scenario, ScenarioError, parse, scaled
from app.cli.door import client_key, key_headers
from workers.lifeline import die_with_parent

logger = logging.getLogger(__name__)

SHARE: Final = "hotspare_share"
OVER: Final = "hotspare_over"
SHARE_SECONDS: Final = 10.0
MODELS_SECONDS: Final = 10.0
PARENT: Final = "HOTSPARE_PARENT_PID"


class Arrivals(User):
    """Whom Locust counts. What is sent, the schedule of the process sends."""

    wait_time = constant(60)

    @task
    def nothing(self) -> None:
        """The schedule does it all."""


class Told(msgspec.Struct, kw_only=True):
    """What a master tells a worker."""

    index: int
    count: int
    host: str
    model: str
    scenario: dict[str, Any]


class Run:
    """What of Locust's events is listened to, and the schedule that runs, if one does."""

    def __init__(self) -> None:
        self._told: Told | None = None
        self._has_told = Flag()
        self._over: set[str] = set()
        self._greenlet: gevent.Greenlet | None = None

    def listen(self) -> None:
        """For good. Started by ``bench load``, the process also ends with it, whatever ends that."""
        if parent := os.environ.get(PARENT):
            die_with_parent(int(parent))
        events.init_command_line_parser.add_listener(_options)
        events.init.add_listener(self._init)
        events.test_start.add_listener(self._start)
        events.test_stop.add_listener(self._stop)

    def _init(self, environment: Environment, runner: Any, **_: Any) -> None:
        if isinstance(runner, WorkerRunner):
            runner.register_message(SHARE, self._take_share)
        if isinstance(runner, MasterRunner):
            runner.register_message(OVER, self._one_is_over)

    def _take_share(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._told = msgspec.json.decode(msg.data, type=Told)
        self._has_told.set()

    def _one_is_over(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._over.add(msg.node_id)
        if self._over >= set(environment.runner.clients):
            _end(environment)

    def _start(self, environment: Environment, **_: Any) -> None:
        runner = environment.runner
        if isinstance(runner, WorkerRunner):
            self._greenlet = gevent.spawn(self._work, environment)
            return
        try:
            told = _from_options(environment)
        except ScenarioError as error:
            logger.error("%s", error)
            environment.process_exit_code = 2
            gevent.spawn(runner.quit)
            return
        if isinstance(runner, MasterRunner):
            self._over.clear()
            workers = list(runner.clients)
            for index, worker in enumerate(workers):
                share = msgspec.structs.replace(told, index=index, count=len(workers))
                runner.send_message(SHARE, msgspec.json.encode(share), worker)
            return
        self._greenlet = gevent.spawn(self._run, environment, told)

    def _stop(self, **_: Any) -> None:
        greenlet, self._greenlet = self._greenlet, None
        if greenlet is not None and greenlet is not gevent.getcurrent():
            greenlet.kill()

    def _work(self, environment: Environment) -> None:
        """As one of several: what the master says comes before the run, or shortly after it began."""
        if not self._has_told.wait(SHARE_SECONDS) or self._told is None:
            logger.error("the master did not say what to send: does it run this locustfile, too?")
            return
        self._has_told.clear()
        self._run(environment, self._told)

    def _run(self, environment: Environment, told: Told) -> None:
        scenario = parse(told.scenario, name="the scenario")
        folder = environment.parsed_options.records
        writer = RecordWriter(Path(folder)) if folder else None
        schedule = Schedule(
            scenario,
            host=told.host,
            model=told.model,
            headers=key_headers(client_key(os.environ)),
            share=Share(told.index, told.count),
            record=writer.write if writer else _nowhere,
            answered=Shown(environment, scenario).answered,
        )
        try:
            schedule.run()
        finally:
            if writer:
                writer.close()
        if isinstance(environment.runner, WorkerRunner):
            environment.runner.send_message(OVER)
        else:
            self._greenlet = None
            _end(environment)


class Shown:
    """Answers as Locust's statistics."""

    def __init__(self, environment: Environment, scenario: Scenario) -> None:
        self._environment = environment
        self._stall = scenario.stall_seconds

    def answered(self, what: Asked, told: Answered) -> None:
        kind, question = what
        problem = ""
        if not told.left:
            problem = problem_of(
                streams=question.streams and question.manner is not Manner.REALTIME,
                status=200 if question.manner is Manner.REALTIME and told.status == 101 else told.status,
                body=told.body,
                broken=told.broken,
            )
        self._environment.events.request.fire(
            request_type="WS" if question.manner is Manner.REALTIME else "POST",
            name=kind,
            response_time=told.total * 1000,
            response_length=len(told.body) or sum(map(len, told.said)),
            exception=Unanswered(problem) if problem else None,
            context={},
        )
        self._row("late", "generator", told.late * 1000)
        if told.first is None:
            return
        self._row("TTFT", kind, told.first * 1000)
        gaps = array("f", told.gaps)
        if gaps:
            spoken = sum(gaps)
            self._row("ITL", kind, spoken / len(gaps) * 1000)
            if spoken:
                self._row("tok/s", kind, told.tokens / (told.first + spoken))
        for gap in gaps:
            if gap >= self._stall:
                self._row("stall", kind, gap * 1000)

    def _row(self, what: str, name: str, value: float) -> None:
        self._environment.stats.get(name, what).log(value, 0)


class Unanswered(Exception):
    """What Locust lists a failed request under."""


def _options(parser: LocustArgumentParser, **_: Any) -> None:
    group = parser.add_argument_group("Hotspare")
    group.add_argument("--scenario", default="steady", help="Name of a scenario, or a file (docs/load-tests.md).")
    group.add_argument("--model", default="", help="Which model to ask. Default: the first one of /v1/models.")
    group.add_argument("--rate", type=float, default=1.0, help="All rates of the scenario times this.")
    group.add_argument("--time", type=float, default=1.0, help="All its times times this.")
    group.add_argument("--records", default="", help="Folder for a record of each answer, as bench load reads them.")


def _from_options(environment: Environment) -> Told:
    """
    Raises:
        ScenarioError: they do not fit, or the host does not answer.
    """
    options = environment.parsed_options
    if not environment.host:
        raise ScenarioError("which server? name it with --host, such as http://127.0.0.1:8000")
    if options.rate <= 0 or options.time <= 0:
        raise ScenarioError("--rate and --time must be above 0")
    scenario = scaled(read_scenario(options.scenario), rate=options.rate, time=options.time)
    if scenario.events and not options.records:
        logger.warning("the scenario's events are left out: only `hotspare bench load` without --host does them")
    return Told(
        index=0,
        count=1,
        host=environment.host,
        model=options.model or _first_model(environment.host),
        scenario=msgspec.to_builtins(scenario),
    )


def _first_model(host: str) -> str:
    try:
        client = Client(base_of(host), key_headers(client_key(os.environ)))
    except ValueError as error:
        raise ScenarioError(str(error)) from None
    answer = client.get("/v1/models", seconds=MODELS_SECONDS)
    client.close()
    try:
        return str(msgspec.json.decode(answer.body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        what = answer.broken or f"status {answer.status}: {answer.body[:200]!r}"
        raise ScenarioError(f"{host}/v1/models names no model ({what}); name one with --model") from None


def _end(environment: Environment) -> None:
    """The end of Locust, too, unless somebody sits before its pages."""
    ending = environment.runner.stop if environment.web_ui else environment.runner.quit
    gevent.spawn(ending)


def _nowhere(record: Record) -> None:
    return
