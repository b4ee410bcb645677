"""Which requests could go on elsewhere, and how the log names them."""

from __future__ import annotations

from typing import Any

import pytest

from workers.asgi import UNRESUMABLE
from workers.change import Change
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM
from workers.in_flight import MOST_NAMED, InFlight, Request, named
from workers.resume import RESUME_CONTENT_TYPE

FROM_GATEWAY = (HEADER_REQUEST_ID.encode(), b"r-1")
NOTED = (HEADER_STREAM.encode(), b"1")


def scope(path: str, *headers: tuple[bytes, bytes], **more: Any) -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": headers, **more}


@pytest.mark.parametrize(
    ("request_scope", "bound"),
    [
        (scope("/v1/completions", FROM_GATEWAY, NOTED), False),
        (scope("/v1/completions", FROM_GATEWAY, (b"content-type", RESUME_CONTENT_TYPE.encode())), False),
        (scope("/v1/completions", FROM_GATEWAY, NOTED, **{UNRESUMABLE: "adapter"}), True),
        (scope("/v1/completions", FROM_GATEWAY), True),
        (scope("/v1/completions", NOTED), True),
        (scope("/v1/embeddings", FROM_GATEWAY), False),
        (scope("/v1/embeddings"), True),
    ],
)
def test_who_is_bound_here(request_scope: dict[str, Any], bound: bool) -> None:
    requests = InFlight(Change())
    requests.enter(request_scope)
    assert bool(requests.bound_here()) is bound
    requests.leave(request_scope)
    assert not requests.bound_here()


def test_it_may_be_said_while_the_answer_is_under_way() -> None:
    requests, running = InFlight(Change()), scope("/v1/completions", FROM_GATEWAY, NOTED)
    requests.enter(running)
    running[UNRESUMABLE] = "several_generations"
    assert [request.request_id for request in requests.bound_here()] == ["r-1"]


def test_a_line_of_the_log_names_only_so_many() -> None:
    requests = [Request(request_id=f"r-{at}", path="/v1/x", seconds=1) for at in range(MOST_NAMED + 2)]
    assert named(requests[:2]) == "r-0 (/v1/x, 1.0 s); r-1 (/v1/x, 1.0 s)"
    assert named(requests).endswith(f"r-{MOST_NAMED - 1} (/v1/x, 1.0 s) and 2 more")
