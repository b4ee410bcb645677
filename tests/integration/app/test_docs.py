"""``/docs`` and what it needs: all from this gateway."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.openai.surface import RELAY_ROUTES
from tests.integration.app.conftest import run_gateway

pytestmark = pytest.mark.integration


async def test_docs_load_nothing_from_elsewhere(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        page = await running.client.get("/docs")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http:" not in page.text
        assert "https:" not in page.text
        linked = re.findall(r"""(?:src|href)="([^"]+)\"""", page.text)
        assert len(linked) == 4
        for path in linked:
            asset = await running.client.get(path)
            assert asset.status_code == 200, path
            assert len(asset.content) > 500
        document = (await running.client.get("/openapi.json")).json()
        assert set(RELAY_ROUTES) <= set(document["paths"])
        assert "security" not in document
        for path in ("/docs/", "/docs/../factory.py", "/docs/redoc.standalone.js", "/redoc"):
            assert (await running.client.get(path)).status_code == 404


async def test_the_page_opens_without_a_key_and_what_it_shows_needs_one(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, api_keys="secret") as running:
        page = await running.client.get("/docs")
        assert page.status_code == 200
        assert "secret" not in page.text
        for path in re.findall(r"""(?:src|href)="([^"]+)\"""", page.text):
            assert (await running.client.get(path)).status_code == 200, path
        for path in ("/openapi.json", "/docs/", "/docs/other", "/docs/../status", "/docs?x/../metrics"):
            expected = 200 if "?" in path else 401
            assert (await running.client.get(path)).status_code == expected, path
        answer = await running.client.get("/openapi.json", headers={"authorization": "Bearer secret"})
        assert answer.json()["security"] == [{"key": []}]


async def test_the_pages_policy_lets_no_script_in_but_its_own(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running:
        page = await running.client.get("/docs")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert re.findall(r"<script(?! src=)|\son\w+=", page.text) == []
        assert (await running.client.get("/docs/page.js")).headers["x-content-type-options"] == "nosniff"
