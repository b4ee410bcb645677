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
        assert len(linked) == 3
        for path in linked:
            asset = await running.client.get(path)
            assert asset.status_code == 200, path
            assert len(asset.content) > 1000
        document = (await running.client.get("/openapi.json")).json()
        assert set(RELAY_ROUTES) <= set(document["paths"])
        assert "security" not in document
        for path in ("/docs/", "/docs/../factory.py", "/docs/redoc.standalone.js", "/redoc"):
            assert (await running.client.get(path)).status_code == 404


async def test_docs_need_a_key_where_keys_are_needed(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    async with run_gateway(worker, api_keys="secret") as running:
        for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json"):
            assert (await running.client.get(path)).status_code == 401
        answer = await running.client.get("/openapi.json", headers={"authorization": "Bearer secret"})
        assert answer.json()["security"] == [{"key": []}]
