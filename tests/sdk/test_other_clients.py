"""Clients that are not the ``openai`` package: Anthropic's form over plain HTTP, other JSON routes, and curl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.openai.surface import RELAY_ROUTES
from tests.sdk.conftest import MODEL
from workers.engines.sim.tokens import encode, expected_text, render_chat

pytestmark = [pytest.mark.sdk, pytest.mark.process, pytest.mark.timeout(60)]

ANTHROPIC = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
TURNS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
SAID = expected_text(render_chat([("system", "be brief"), ("user", "hello")]), 8)


def post(base_url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(base_url + path, json=body, timeout=20, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(lines: list[str]) -> list[tuple[str, Any]]:
    found = []
    for name, data in zip(lines[::3], lines[1::3], strict=True):
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_messages(base_url: str) -> None:
    body = {"model": MODEL, "max_tokens": 8, "system": "be brief", "messages": TURNS}
    with httpx.Client(base_url=base_url, headers=ANTHROPIC, timeout=20, trust_env=False) as client:
        whole = client.post("/v1/messages", json=body).json()
        assert whole["content"] == [{"type": "text", "text": SAID}]
        assert (whole["type"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ("message", "max_tokens", 8)
        counted = client.post("/v1/messages/count_tokens", json={k: body[k] for k in ("model", "system", "messages")})
        assert counted.json() == {"input_tokens": whole["usage"]["input_tokens"]}

        with client.stream("POST", "/v1/messages", json=body | {"stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = events(list(answer.iter_lines()))
        names = [name for name, _ in found]
        assert [name for name in names if name != "content_block_delta"] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert all(name == data["type"] for name, data in found)
        assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == SAID

        refused = client.post("/v1/messages", json={"model": MODEL, "messages": TURNS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_scores(base_url: str) -> None:
    documents = ["a yellow bird", "the green house", "the house by the river"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(base_url, path, model=MODEL, query="the house", documents=documents, top_n=2)
        assert [result["index"] for result in ranked["results"]] == [1, 2]
        assert ranked["results"][0]["document"] == {"text": "the green house"}
    for path in ("/score", "/v1/score"):
        scored = post(base_url, path, model=MODEL, text_1="the house", text_2=documents)
        assert [item["score"] for item in scored["data"]] == pytest.approx([0, 2 / 3, 2 / 4])
    assert post(base_url, "/classify", model=MODEL, input="x")["data"][0]["num_classes"] == 2
    assert len(post(base_url, "/pooling", model=MODEL, input="x")["data"][0]["data"]) == 64


def test_tokens(base_url: str) -> None:
    there = post(base_url, "/tokenize", model=MODEL, prompt="the house é")
    assert there["tokens"] == encode("the house é")
    assert post(base_url, "/detokenize", model=MODEL, tokens=there["tokens"]) == {"prompt": "the house é"}


def test_every_relayed_route_is_served(base_url: str) -> None:
    """With an empty body: refused by the worker for what is missing, and never for the path."""
    for path, route in RELAY_ROUTES.items():
        if "/audio/" in path:
            kind = {"content-type": "multipart/form-data; boundary=B"}
            answer = httpx.post(base_url + path, content=b"--B--\r\n", headers=kind, trust_env=False)
        else:
            answer = httpx.post(base_url + path, json={"model": MODEL}, trust_env=False)
        assert answer.status_code == 400, (route.path, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def curl(base_url: str, *, stream: bool) -> str:
    """The README's command, for this gateway and the sim's model."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    found = re.search(r"^ {4}(curl .*?\}'\n?)", readme, re.MULTILINE | re.DOTALL)
    assert found is not None
    command = found[1].replace("http://localhost:8000", base_url).replace("smollm2", MODEL)
    if stream:
        command = command.replace("curl ", "curl -N ", 1).replace('"max_tokens"', '"stream": true, "max_tokens"')
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl --silent --show-error --noproxy '*' ", 1)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_as_in_the_readme(base_url: str) -> None:
    whole = json.loads(curl(base_url, stream=False))["choices"][0]["message"]["content"]
    *pieces, done, end = curl(base_url, stream=True).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    documents = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
    assert "".join(document["choices"][0]["delta"].get("content", "") for document in documents) == whole
    assert len(whole.split()) >= 64
