"""``GET /openapi.json``, and ``/docs``: the same for people. Nothing is loaded from elsewhere: scripts and styles come
from a package, and the page's policy forbids anything else, a script within the page included.

A browser cannot show an API key when it opens a page. So the page itself and its scripts, in which nothing is secret,
need none; it asks for the key where one is needed, and fetches the document with it. The key stays in its memory.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response

from app.openai.document import SECURITY_SCHEME, TITLE, openapi_document
from app.openai.surface import RELAY_ROUTES

_ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_SCRIPT: Final = "page.js"
DOCS_PATHS: Final = frozenset(f"/docs{name}".encode() for name in ("", *(f"/{it}" for it in (*_ASSETS, _SCRIPT))))
"""What a browser opens without a key."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self'; "
    "style-src 'self' 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}
_PAGE: Final = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{TITLE}</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
<link rel="icon" href="/docs/favicon.png">
</head>
<body>
<form id="ask" hidden>
<label>API key of this gateway: <input id="key" type="password" autocomplete="off" required></label>
<button>Show</button>
</form>
<p id="said" role="status"></p>
<div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/{_SCRIPT}"></script>
</body>
</html>
"""
_PAGE_SCRIPT: Final = """\
"use strict";
const ask = document.getElementById("ask");
const field = document.getElementById("key");
const said = document.getElementById("said");

async function show(key) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("/openapi.json", { headers });
  if (answer.status === 401) {
    ask.hidden = false;
    said.textContent = key ? "The gateway does not know this key." : "";
    return;
  }
  if (!answer.ok) {
    throw new Error(`the gateway answers ${answer.status}`);
  }
  const spec = await answer.json();
  ask.hidden = true;
  said.textContent = "";
  const ui = SwaggerUIBundle({
    spec,
    dom_id: "#swagger-ui",
    deepLinking: true,
    validatorUrl: null,
    onComplete: () => key && ui.preauthorizeApiKey("SCHEME", key),
  });
}

function start(key) {
  show(key).catch((error) => {
    said.textContent = `The routes cannot be shown: ${error.message}`;
  });
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  const given = field.value.trim();
  field.value = "";
  start(given);
});
start("");
""".replace("SCHEME", SECURITY_SCHEME)


def docs_router(*, version: str, authenticated: bool) -> APIRouter:
    """``authenticated``: whether requests need an API key; reading the document needs one, then, too."""
    router = APIRouter()
    document = msgspec.json.encode(
        openapi_document(RELAY_ROUTES.values(), version=version, authenticated=authenticated)
    )
    folder = Path(str(files("fastapi_offline"))) / "static"

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    @router.get(f"/docs/{_SCRIPT}")
    async def script() -> Response:
        return Response(_PAGE_SCRIPT, media_type="text/javascript", headers=_HEADERS)

    def asset(name: str, media_type: str) -> None:
        @router.get(f"/docs/{name}")
        async def read() -> FileResponse:
            return FileResponse(folder / name, media_type=media_type, headers=_HEADERS)

    for name, media_type in _ASSETS.items():
        asset(name, media_type)
    return router
