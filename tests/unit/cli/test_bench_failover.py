"""``hotspare bench failover``, its pure parts: scaling, series, figures, plots, and the pages over them."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from xml.etree import ElementTree

import pytest

from app.cli.bench.failover import page
from app.cli.bench.failover.figures import EACH, Life, Sample, Seen, figures, summarise
from app.cli.bench.failover.load import _read
from app.cli.bench.failover.scale import Model, Plan, environment, plan_of
from app.cli.bench.failover.series import Limits, Record, edges, shares, spread, thinned, user_rates
from app.cli.bench.failover.svg import Curve, Plot, drawn, picture, ticks
from app.cli.bench.failover.words import ROWS, findings, table
from app.cli.variables import KNOWN
from workers.engines.sim.accelerator import Accelerator
from workers.settings import SimSettings

SVG = "{http://www.w3.org/2000/svg}"


def record(number: int = 0, due: float = 0.0, *at: float, end: str = Record.WHOLE, **more: Any) -> Record:
    return Record(number=number, due=due, sent=due, at=list(at), end=end, **more)


# --- scaling


def accelerator_of(plan: Plan) -> Accelerator:
    """As an engine would read it."""
    told = {name.removeprefix("HOTSPARE_SIM_").lower(): value for name, value in environment(plan).items()}
    sim = SimSettings(**{name: value for name, value in told.items() if name in SimSettings.model_fields})
    fields = Accelerator.__struct_fields__
    return Accelerator(**{name: getattr(sim, name) for name in fields})


@pytest.mark.parametrize(("speed", "group"), [(1, 1), (20, 10), (20, 20), (7, 3)])
def test_a_scaled_accelerator_is_as_fast_once_it_is_scaled_back(speed: float, group: int) -> None:
    real, plan = Model(), plan_of("sim", "full", speed=speed, group=group)
    scaled = accelerator_of(plan)
    # One step of the run, with 4 sequences of 33,000 tokens, makes as many tokens as ``group`` real ones.
    took = scaled.seconds(sequences=4, context_tokens=round(4 * 33_000 / group), prefill_tokens=0)
    expected = real.step_seconds + 4 * real.sequence_seconds + 4 * 33_000 * real.context_token_seconds
    assert plan.real_seconds(took) == pytest.approx(group * expected, rel=1e-3)
    prompt = plan.tokens(32_000) / scaled.prefill_tokens_per_second
    assert plan.real_seconds(prompt) == pytest.approx(32_000 / real.prefill_tokens_per_second, rel=1e-3)
    assert plan.real_rate(1 / took) == pytest.approx(1 / expected, rel=1e-3)


def test_two_workers_are_comfortable_and_one_is_overloaded() -> None:
    """What docs/failover.md says that the figures are chosen for: the share of its time that a worker is busy, prefill
    and what each sequence adds to a step, with its half of the requests and with all of them."""
    plan, model = plan_of("sim", "full"), Model()
    context = plan.prompt_tokens + plan.answer_tokens / 2
    each = model.sequence_seconds + context * model.context_token_seconds
    request = plan.prompt_tokens / model.prefill_tokens_per_second + plan.answer_tokens * each
    assert 0.3 < plan.requests_per_second / 2 * request < 0.6
    # With the KV cache full, a step's constant part is shared by as many sequences as it has room for.
    room = model.kv_tokens // (plan.prompt_tokens + plan.answer_tokens)
    most = 1 / (request + plan.answer_tokens * model.step_seconds / room)
    assert plan.requests_per_second / 2 < most < plan.requests_per_second


def test_the_reference_is_what_a_full_run_does() -> None:
    plan = plan_of("sim", "full")
    assert (plan.requests_per_second, plan.prompt_tokens, plan.answer_tokens) == (0.7, 32_000, 1_000)
    assert (plan.speed, plan.group, plan.observe_seconds) == (1, 1, 600)
    assert plan.model is not None
    assert plan.model.restart_seconds == 283


def test_what_is_given_takes_the_place_of_the_usual() -> None:
    plan = plan_of("sim", "short", restart_seconds=10.0, rate_limit=None, group=4)
    assert plan.model is not None
    assert (plan.model.restart_seconds, plan.rate_limit, plan.speed, plan.group) == (10.0, 30.0, 20.0, 4)
    assert plan_of("vllm", "short").model is None


def test_every_variable_that_it_sets_is_known() -> None:
    for engine in ("sim", "vllm"):
        assert environment(plan_of(engine, "short")).keys() <= KNOWN


# --- series


def test_what_a_request_saw() -> None:
    one = record(0, 10.0, 11.0, 11.5, 14.0, 14.5)
    assert (one.ttft, one.rate, one.lost) == (1.0, pytest.approx(3 / 3.5), False)
    assert one.stall(12.0) == 2.5
    assert one.stall(14.2) == 0.5
    assert one.stall(10.5) is None, "it had had nothing by then"
    assert one.stall(15.0) is None
    nothing = record(0, 10.0, end="status 503")
    assert (nothing.ttft, nothing.rate, nothing.stall(0.0), nothing.lost) == (None, None, None, True)


def test_lateness_of_the_load_counts_as_waiting() -> None:
    assert Record(number=0, due=1.0, sent=3.0, at=[4.0], end=Record.WHOLE).ttft == 3.0


def test_spread() -> None:
    assert spread([None]) is None
    found = spread([*range(1, 101), None])
    assert found == {"min": 1, "p1": 1, "median": 50.5, "p90": 90, "p99": 99, "max": 100}


def test_bins_begin_at_the_kill() -> None:
    assert edges(-15.0, 21.0, 10.0) == [-20.0, -10.0, 0.0, 10.0, 20.0, 30.0]


def test_the_rate_of_a_user_counts_pauses_and_nobody_else() -> None:
    steady = record(0, 0.0, *(100.0 + number / 10 for number in range(101)))
    paused = record(1, 0.0, 100.0, 109.0, 110.0)
    bins = edges(0.0, 20.0, 10.0)
    assert user_rates([steady], bins, zero=100.0) == [(5.0, pytest.approx(99 / 10))]
    ((_, both),) = user_rates([steady, paused], bins, zero=100.0)
    assert both == pytest.approx((99 + 1) / 20)
    assert user_rates([record(0, 0.0, 1.0)], bins, zero=0.0) == []


def test_shares_of_those_that_missed_the_service_level() -> None:
    limits = Limits(ttft=1.0, rate=1.0)
    good, late, slow = record(0, 1.0, 1.5, 2.0), record(1, 2.0, 9.0, 9.1), record(2, 3.0, 3.1, 13.0)
    never = record(3, 12.0, end="status 500")
    assert shares([good, late, slow, never], edges(0.0, 20.0, 10.0), limits, zero=0.0) == [
        (5.0, pytest.approx(2 / 3)),
        (15.0, 1.0),
    ]


def test_thinning_keeps_peaks() -> None:
    points = [(float(at), float(at == 501)) for at in range(1000)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert (501.0, 1.0) in few


# --- figures


def seen(arm: str = "shadow", *, took: float = 10.0, routable: float = 1000.2) -> Seen:
    records = [
        record(number, 900.0 + number, *(902.0 + number + token for token in range(60))) for number in range(200)
    ]
    records[60].resumes = 1
    return Seen(
        arm=arm,
        meaning="<a shadow> & more",
        began=900.0,
        killed=1000.0,
        victim="pod-0",
        ended=1100.0,
        detected=1000.001,
        routable=routable,
        spare=1005.0,
        interrupted=3,
        records=records,
        samples=[
            Sample(at=990.0, worker="pod-0", inflight=5, waiting=1),
            Sample(at=1010.0, worker="pod-0", inflight=6, waiting=2),
            Sample(at=1010.0, worker="pod-1", inflight=7, waiting=None),
        ],
        lives=[
            Life(
                worker="pod-0",
                epoch=2,
                steps=9,
                wanted_seconds=10.0,
                took_seconds=took,
                latest_seconds=0.004,
                prefilled_tokens=1000,
                prefilled_again_tokens=77,
                cached_tokens=5,
            )
        ],
    )


PLAN = plan_of("sim", "full", speed=20, group=10, settle_seconds=2000, observe_seconds=2000)


def test_figures_are_scaled_back_and_what_was_measured_stands_beside_them() -> None:
    found = figures(seen(), PLAN)
    assert found["routable_seconds"] == pytest.approx(4.0)
    assert found["measured"]["routable_seconds"] == pytest.approx(0.2)
    assert found["spare_seconds"] == pytest.approx(100.0)
    assert found["before"]["ttft_seconds"]["median"] == pytest.approx(40.0)
    assert found["before"]["tokens_per_second"]["median"] == pytest.approx(10 / 20)
    assert found["stall_seconds"]["max"] == pytest.approx(20.0)
    assert (found["prefilled_again_tokens"], found["cached_tokens"]) == (770, 50)
    assert (found["before"]["requests"], found["after"]["requests"], found["requests"]) == (100, 100, 200)
    assert (found["resumed"], found["lost"], found["interrupted"]) == (1, 0, 3)
    assert found["series"]["inflight"] == {"pod-0": [[-200.0, 5.0], [200.0, 6.0]], "pod-1": [[200.0, 7.0]]}
    assert found["series"]["waiting"]["pod-1"] == []
    assert len(found["each"]) == 200
    assert len(found["each"][0]) == len(EACH)


@pytest.mark.parametrize(("took", "late", "held"), [(10.4, 0.0, True), (10.6, 0.0, False), (10.0, 0.2, False)])
def test_a_machine_that_is_too_slow_is_called_so(took: float, late: float, held: bool) -> None:
    one = seen(took=took)
    for each in one.records:
        each.sent += late
    report = summarise(PLAN, [one], {})
    assert report["held"] is report["arms"]["shadow"]["held"] is held
    assert any("too slow" in line for line in findings(report)) is not held


def test_the_report_compares_the_arms() -> None:
    report = summarise(PLAN, [seen("cold", routable=1020.0), seen(), seen("shadow_carry", routable=1000.1)], {"x": "y"})
    assert (report["ratio"], report["carry_ratio"]) == (100.0, 200.0)
    assert report["broken"] == {"x": "y"}
    assert "Cold ÷ shadow: 100, 200 with the KV cache carried over (reference: 39)." in findings(report)
    rows = table(report)
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == len(ROWS) + 1
    assert rows[1] == ["SIGKILL → second worker routable again", "283 s", "7.30 s", "400 s", "4.00 s", "2.00 s"]


# --- the load's reader


def wire(*events: str, status: str = "200 OK", whole: bool = True) -> bytes:
    """An answer in chunks of odd sizes."""
    body = "".join(events).encode()
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    head = f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + chunks + (b"0\r\n\r\n" if whole else b"")


TOKEN = 'data: {"choices":[{"index":0,"text":"a \\n\\n b"}]}\n\n'
OTHERS = ': keep-alive\n\ndata: {"choices":[],"usage":{}}\n\n'
DONE = "data: [DONE]\n\n"


async def read(raw: bytes, *, step: int) -> Record:
    reader, one = asyncio.StreamReader(), Record(number=0, due=0.0, sent=0.0)
    reading = asyncio.create_task(_read(reader, one))
    for at in range(0, len(raw), step):
        reader.feed_data(raw[at : at + step])
        await asyncio.sleep(0)
    reader.feed_eof()
    one.end = await reading
    return one


@pytest.mark.parametrize("step", [1, 5, 10_000])
async def test_an_answer_is_read_whatever_pieces_it_comes_in(step: int) -> None:
    one = await read(wire(TOKEN, OTHERS, TOKEN, TOKEN, DONE), step=step)
    assert (one.end, len(one.at), one.lost) == ("whole", 3, False)
    assert one.at == sorted(one.at)


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize(
    ("raw", "end"),
    [
        (wire(TOKEN, TOKEN), "it ended after 2 tokens, without its end"),
        (wire(TOKEN, DONE, whole=False)[:-20], "it ended after 1 tokens, without its end"),
        (wire(TOKEN, 'data: {"error":{"code":"worker_lost"}}\n\n', DONE), "an error: {'code': 'worker_lost'}"),
        (wire('{"error":{"code":"no_worker"}}', status="503 No"), """status 503: b'{"error":{"code":"no_worker"}}'"""),
        (b"", "it ended after 0 tokens, without its end"),
    ],
)
async def test_an_answer_that_is_not_whole_is_lost(raw: bytes, end: str, step: int) -> None:
    one = await read(raw, step=step)
    assert one.end == end
    assert one.lost


# --- plots and pages


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(0, 10, [0, 2, 4, 6, 8, 10]), (-90, 600, [0, 200, 400, 600]), (0, 0, [0])]
)
def test_ticks_are_round(first: float, last: float, expected: list[float]) -> None:
    assert ticks(last, first=first) == pytest.approx(expected)


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_a_plot_is_well_formed_whatever_is_in_it() -> None:
    plot = Plot(
        title="a < b & c",
        first=-10,
        last=50,
        curves=[
            Curve(name='"x"', kind="a", points=[(-5, 1), (5, 200), (99, 1)], dots=True),
            Curve(name="y", kind="b", points=[(0, 3), (20, 4)]),
            Curve(name="nothing", kind="c", points=[]),
        ],
        limit=2.0,
        limit_name="<limit>",
        marks=[(7.0, "back"), (70.0, "too late to be shown")],
    )
    root = parsed(picture([plot, plot], style=True, label="<'\">"))
    groups = root.findall(f"{SVG}g")
    assert len(groups) == 2
    texts = [text.text for text in groups[0].iter(f"{SVG}text")]
    assert {"a < b & c", "SIGKILL", "back", "<limit>", "nothing"} <= set(texts)
    assert "too late to be shown" not in texts
    assert len(list(groups[0].iter(f"{SVG}circle"))) == 2, "those within its time"
    for circle in groups[0].iter(f"{SVG}circle"):
        assert math.isfinite(float(circle.attrib["cy"]))


def test_a_plot_of_nothing_is_one_too() -> None:
    parsed(drawn(Plot(title="t", first=0, last=1, curves=[])))


def test_the_pages_are_whole() -> None:
    report = summarise(PLAN, [seen("cold"), seen(), seen("shadow_carry")], {})
    root = parsed(page.page(report).removeprefix("<!DOCTYPE html>\n"))
    assert len(list(root.iter(f"{SVG}svg"))) == 3 + 3 * 2
    assert "http" not in page.page(report).replace("http://www.w3.org/2000/svg", ""), "it fetches nothing"
    words = page.markdown(report)
    assert "| SIGKILL → second worker routable again | 283 s | 7.30 s | 4.00 s | 4.00 s | 4.00 s |" in words
    for text in (page.page(report), words):
        assert "Simulated: " in text
        assert "Real: " in text
    assert len(parsed(page.image(report)).findall(f"{SVG}g")) == 3


def test_a_run_on_vllm_says_that_nothing_is_simulated() -> None:
    one = seen()
    one.lives = []
    plan = plan_of("vllm", "short")
    words = page.markdown(summarise(plan, [one], {}))
    assert "Nothing is simulated" in words
    assert "Simulated:" not in words
