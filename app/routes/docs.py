"""``GET /openapi.json``, and ``/docs``: the same for people. Nothing is loaded from elsewhere: scripts and styles come
from a package, and the page's policy forbids anything else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, Response

from app.openai.document import TITLE, openapi_document
from app.openai.surface import RELAY_ROUTES

_ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_POLICY: Final = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}


def docs_router(*, version: str, authenticated: bool) -> APIRouter:
    """``authenticated``: whether requests need an API key; reading these pages needs one, then, too."""
    router = APIRouter()
    document = msgspec.json.encode(
        openapi_document(RELAY_ROUTES.values(), version=version, authenticated=authenticated)
    )
    folder = Path(str(files("fastapi_offline"))) / "static"
    page = bytes(
        get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=TITLE,
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},
        ).body
    )

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(page, headers=_POLICY)

    def asset(name: str, media_type: str) -> None:
        @router.get(f"/docs/{name}")
        async def read() -> FileResponse:
            return FileResponse(folder / name, media_type=media_type, headers=_POLICY)

    for name, media_type in _ASSETS.items():
        asset(name, media_type)
    return router
