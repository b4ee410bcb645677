"""Scenarios: what they say, what of them is refused and how, when requests arrive, and what these ask."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.cli.bench.chaos.plan import Manner
from app.cli.bench.loadtest import process
from app.cli.bench.loadtest.arrivals import arrivals
from app.cli.bench.loadtest.asked import asked
from app.cli.bench.loadtest.command import load
from app.cli.bench.loadtest.files import names, read_scenario
from app.cli.bench.loadtest.scenario import KINDS, Scenario, ScenarioError, parse, scaled
from app.cli.errors import CliError
from workers.exit_codes import ExitCode

SMALL: dict[str, Any] = {"phases": [{"seconds": 10, "rate": 2}], "mix": {"chat": 1}}


def scenario(**changed: Any) -> Scenario:
    return parse({**SMALL, **changed}, name="it")


def test_those_that_come_along_can_be_read() -> None:
    assert names() == ["burst", "long-context", "node-loss", "ramp", "rollout", "soak", "steady"]
    for name in names():
        read = read_scenario(name)
        assert read.about
        assert read.limits
        assert scaled(read, rate=0.5, time=2).expected == pytest.approx(read.expected)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"phase": []}, "the key 'phase' is unknown; did you mean phases?"),
        ({"phases": [{"second": 1, "rate": 1}]}, "phases[0]: the key 'second' is unknown; did you mean seconds?"),
        ({"phases": [{"rate": 1}]}, "phases[0]: Object missing required field `seconds`"),
        ({"phases": []}, "phases: Expected `array` of length >= 1"),
        ({"phases": [{"seconds": "10", "rate": 1}]}, "phases[0].seconds: Expected `float`, got `str`"),
        ({"phases": [{"seconds": 10, "rate": 0}]}, "no phase has a rate above 0"),
        ({"mix": {"chats": 1}}, "mix has a kind 'chats'; did you mean chat?"),
        ({"mix": {"chat": 0}}, "mix asks for nothing"),
        ({"mix": {"tea": 1}}, "mix has a kind 'tea'; these are known: chat, chat-stream"),
        ({"limits": {"ttft_p98_seconds": 1}}, "limits has 'ttft_p98_seconds'; did you mean ttft_p"),
        ({"limits": {"lost": -1}}, "a number of at least 0 is needed"),
        ({"answer_tokens": {"uniform": {"least": 9, "most": 3}}}, "least is more than most"),
        ({"answer_tokens": {"normal": {}}}, "answer_tokens: the key 'normal' is unknown; did you mean lognormal?"),
        ({"answer_tokens": {}}, "it takes either uniform or lognormal"),
        ({"answer_tokens": 0}, "answer_tokens: Expected `int` >= 1"),
        ({"cancels": 0.6, "slow_readers": 0.6}, "together are more than 1"),
        ({"events": [{"at": 11, "do": "handover"}]}, "events[0] comes at 11 s, and all is over at 10 s"),
        ({"events": [{"at": 1, "do": "handover", "pod": 1}]}, "pods count from 0 to 0"),
        ({"events": [{"at": 1, "do": "kill"}]}, "events[0].do: Invalid enum value 'kill'"),
        ({"events": [{"at": 1, "do": "lose-pod"}]}, "one pod must be left that no event ends"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ScenarioError) as told:
        scenario(**changed)
    assert sentence in str(told.value)
    assert str(told.value).startswith("it: ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed: 1\nseed: 2\n", "the key 'seed' stands there twice"),
        ("phases: [", "is no YAML"),
        ("- 1\n", "it must consist of keys and values"),
        ("", "it must consist of keys and values"),
        ("{[1]: 2}", "is no YAML"),
    ],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=str(path)) as told:
        read_scenario(str(path))
    assert sentence in str(told.value)


def test_a_name_that_is_none() -> None:
    with pytest.raises(ScenarioError, match="there is no scenario 'stedy', and no such file; scenarios: burst, "):
        read_scenario("stedy")


def moments(read: Scenario) -> list[float]:
    return [arrival.at for arrival in arrivals(read)]


def test_arrivals_follow_from_the_seed() -> None:
    phases = [{"seconds": 100, "rate": 10}, {"seconds": 50, "rate": 10, "to": 0}, {"seconds": 50, "rate": 4}]
    one, again, other = (list(arrivals(scenario(phases=phases, seed=seed))) for seed in (1, 1, 2))
    assert one == again != other
    assert [arrival.number for arrival in one] == list(range(len(one)))
    assert all(before.at <= after.at for before, after in itertools.pairwise(one))
    counts = Counter(arrival.phase for arrival in one)
    for phase, expected in enumerate((1000, 250, 200)):  # a Poisson count's deviation is its root
        assert abs(counts[phase] - expected) < 4 * expected**0.5
    assert all(sum(p["seconds"] for p in phases[: a.phase]) <= a.at for a in one)
    gaps = [after.at - before.at for before, after in itertools.pairwise(one) if after.phase == 0]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.85 < deviation / mean < 1.15  # 1: exponential; 0: even


def test_constant_arrivals_are_even_and_a_ramp_has_its_area() -> None:
    assert moments(scenario(arrivals="constant")) == [0.5 * number for number in range(20)]
    ramp = moments(scenario(arrivals="constant", phases=[{"seconds": 10, "rate": 0, "to": 4}]))
    assert len(ramp) == 20
    for number, at in enumerate(ramp):
        assert at**2 * 4 / 20 == pytest.approx(number)


def test_a_phase_without_arrivals_is_waited_for() -> None:
    phases = [{"seconds": 5, "rate": 0}, {"seconds": 5, "rate": 1}]
    assert moments(scenario(arrivals="constant", phases=phases)) == [5, 6, 7, 8, 9]


def test_scaled() -> None:
    events = [{"at": 10, "do": "handover"}]
    read = scaled(scenario(arrivals="constant", events=events), rate=3, time=0.1)
    assert (read.seconds, read.events[0].at) == (1.0, 1.0)
    assert len(moments(read)) == 6


def test_a_request_follows_from_seed_and_number() -> None:
    read = scenario(
        mix=dict.fromkeys(KINDS, 1),
        cancels=0.25,
        slow_readers=0.25,
        prompt_words={"lognormal": {"median": 20, "sigma": 1, "most": 50}},
        answer_tokens={"uniform": {"least": 3, "most": 7}},
    )
    asks = [asked(read, number) for number in range(2000)]
    assert asks == [asked(read, number) for number in range(2000)]
    assert asks != [asked(scenario(mix=dict.fromkeys(KINDS, 1), seed=1), number) for number in range(2000)]
    assert {one.kind for one in asks} == set(KINDS)
    for kind, question in asks:
        assert (question.path, question.manner is not Manner.WHOLE) == KINDS[kind]
        assert len(question.prompts) == (2 if kind == "realtime" else 1)
        assert 3 <= question.tokens <= 7
        assert all(1 <= len(prompt.split(" ")) <= 50 for prompt in question.prompts)
    streams = [one.question.manner for one in asks if one.kind == "chat-stream"]
    assert set(streams) == {Manner.STREAM, Manner.CANCEL, Manner.SLOW}
    words = sorted(len(one.question.prompts[0].split(" ")) for one in asks)
    assert 17 <= words[1000] <= 23
    assert words[-1] == 50


def test_prompts_of_any_length_are_cut_from_words() -> None:
    whole = {asked(scenario(prompt_words=3), number).question.prompts[0] for number in range(500)}
    assert len(whole) > 450
    assert all(len(prompt.split()) == 3 and prompt == prompt.strip() for prompt in whole)
    assert len(asked(scenario(prompt_words=100_000), 1).question.prompts[0].split(" ")) == 100_000


def test_without_locust_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None if name == "locust" else object())
    with pytest.raises(CliError) as told:
        load("steady")
    assert str(told.value) == (
        "bench load: this needs locust, which nothing but the load tests uses: "
        "`make setup-test` in a checkout installs it, or `pip install 'hotspare[load]'`"
    )
    assert told.value.code == ExitCode.BAD_CONFIGURATION
