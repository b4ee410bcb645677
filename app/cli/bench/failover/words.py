"""[P] The report as rows and sentences: what the Markdown summary and the page have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

TITLE: Final = "Failover under load: a cold restart against a shadow engine"

SIMULATED: Final = (
    "simulated: how long the accelerator's steps take (prefill, decode), how much its KV cache holds, how long an "
    "engine takes to start, and the tokens themselves; weights and KV pages are small stand-ins"
)
REAL: Final = (
    "real: the processes, the SIGKILL, the lock, the memory service and its pages, sockets and HTTP, the gateway, the "
    "load, and that interrupted answers are resumed token by token"
)
ON_VLLM: Final = (
    "nothing is simulated: vLLM's engines with SmolLM2-135M on the CPU, so that times are those of this machine"
)

Show = Callable[[Mapping[str, Any]], str]


def seconds(value: float | None) -> str:
    """With as many digits as say something."""
    if value is None:
        return "-"
    return f"{value:.3f} s" if abs(value) < 1 else f"{value:.2f} s" if abs(value) < 10 else f"{value:.0f} s"


def _of(spread: Mapping[str, float] | None, *names: str, form: Callable[[float], str]) -> str:
    return "-" if spread is None else " / ".join(form(spread[name]) for name in names)


def _share(service: Mapping[str, Any], name: str) -> str:
    asked = service["requests"]
    return f"{service[name]} of {asked} ({100 * service[name] / asked:.1f} %)" if asked else "-"


def _service(when: str) -> list[tuple[str, Show]]:
    def rate(value: float) -> str:
        return f"{value:.1f}"

    return [
        (f"{when}: first token, median / p99", lambda a: _of(a[when]["ttft_seconds"], "median", "p99", form=seconds)),
        (
            f"{when}: tokens/s of a user, median / p1",
            lambda a: _of(a[when]["tokens_per_second"], "median", "p1", form=rate),
        ),
        (f"{when}: requests below the service level", lambda a: _share(a[when], "violations")),
    ]


def _count(name: str) -> Show:
    return lambda arm: "-" if arm[name] is None else f"{arm[name]:,}"


ROWS: Final[tuple[tuple[str, Show], ...]] = (
    ("SIGKILL → second worker routable again", lambda a: seconds(a["routable_seconds"])),
    ("the same, as measured", lambda a: seconds(a["measured"]["routable_seconds"])),
    ("SIGKILL → it has a spare again", lambda a: seconds(a["spare_seconds"])),
    *_service("before"),
    *_service("after"),
    ("requests under way at the killed engine", _count("interrupted")),
    ("answers resumed elsewhere", _count("resumed")),
    ("requests run again, unseen", _count("run_again")),
    (
        "silence of resumed answers, median / max",
        lambda a: _of(a["stall_seconds"], "median", "max", form=seconds),
    ),
    ("tokens prefilled again for them", _count("prefilled_again_tokens")),
    ("tokens found in the prefix cache", _count("cached_tokens")),
    ("requests lost", lambda a: f"{a['lost']} of {a['requests']}"),
    ("steps took, of what they were to take", lambda a: "-" if a["step_ratio"] is None else f"{a['step_ratio']:.3f}"),
    (
        "requests were sent late by, p99 (as measured)",
        lambda a: _of(a["late_seconds"], "p99", form=lambda value: f"{1000 * value:.1f} ms"),
    ),
)


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """Rows of cells, the first one the head."""
    arms, reference = report["arms"], report["reference_seconds"]
    head = ["", "reference: cold", "reference: shadow", *arms]
    rows = [head]
    for number, (meaning, show) in enumerate(ROWS):
        theirs = [seconds(reference["cold"]), seconds(reference["shadow"])] if number == 0 else ["", ""]
        if report["plan"]["speed"] == 1 and meaning == "the same, as measured":
            continue
        rows.append([meaning, *theirs, *(show(arm) for arm in arms.values())])
    return rows


def about(report: Mapping[str, Any]) -> list[str]:
    """What was done, in sentences."""
    plan = report["plan"]
    lines = [
        f"Two workers behind one gateway, round-robin; {plan['requests_per_second']:g} requests a second with "
        f"{plan['prompt_tokens']:,} tokens of prompt and {plan['answer_tokens']:,} of answer; after "
        f"{plan['settle_seconds']:g} s the first worker's active engine is killed with SIGKILL, and "
        f"{plan['observe_seconds']:g} s more are observed. Engine: {report['engine']}."
    ]
    if plan["speed"] != 1 or plan["group"] != 1:
        lines.append(
            f"This run was {plan['speed']:g} times as fast, and one of its tokens stands for {plan['group']}: all "
            "figures but those marked as measured are scaled back. What is real was not faster in it: where that is a "
            f"part of a figure (promotion, connections, timers) it counts {plan['speed']:g} times here."
        )
    lines.append(
        f"Service level: first token within {plan['ttft_limit_seconds']:g} s, and {plan['rate_limit']:g} tokens a "
        "second for each user."
    )
    lines += (
        [f"{SIMULATED[0].upper()}{SIMULATED[1:]}.", f"{REAL[0].upper()}{REAL[1:]}."]
        if plan["model"]
        else [f"{ON_VLLM[0].upper()}{ON_VLLM[1:]}."]
    )
    return lines


def findings(report: Mapping[str, Any]) -> list[str]:
    """What came of it, and what there is to say against it."""
    found = []
    if "ratio" in report:
        carry = f", {report['carry_ratio']:g} with the KV cache carried over" if "carry_ratio" in report else ""
        reference = report["reference_seconds"]
        found.append(
            f"Cold ÷ shadow: {report['ratio']:g}{carry} (reference: {reference['cold'] / reference['shadow']:.0f})."
        )
    requests = sum(arm["requests"] for arm in report["arms"].values())
    found.append(f"{report['lost']} of {requests:,} requests were lost.")
    for name, arm in report["arms"].items():
        if not arm["held"]:
            found.append(f"The machine was too slow for the arm {name}, and its figures say less: {_too_slow(arm)}.")
        found += [f"Problem in {name}: {problem}" for problem in arm["problems"]]
    found += [f"The arm {name} was given up: {why}" for name, why in report["broken"].items()]
    return found


def _too_slow(arm: Mapping[str, Any]) -> str:
    """How that showed."""
    late = f"requests were sent late, by {1000 * arm['late_seconds']['p99']:.0f} ms at the 99th percentile"
    if arm["step_ratio"] is None:
        return late
    return f"{late}, and simulated steps took {arm['step_ratio']:.2f} times what they were to take"
