"""The pod's serving port under one epoch: the application, the server, and the connections of both."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from workers.http_server import HttpServer, serve_http
from workers.route_groups import RouteGroup
from workers.serving import ServingApp


class ServingPort:
    def __init__(self, app: ServingApp, server: HttpServer, *, epoch: int) -> None:
        self.app = app
        self.server = server
        self.epoch = epoch

    def cut(self) -> None:
        """End everything that is being answered, in the middle: gateways go on elsewhere. Watches end in order."""
        self.cut_groups(RouteGroup)
        self.app.let_go()

    def cut_groups(self, groups: Iterable[RouteGroup]) -> int:
        """The same for requests of these groups; how many there were."""
        scopes = self.app.requests.of(groups)
        for scope in scopes:
            self.server.cut_request(scope)
        return len(scopes)


@asynccontextmanager
async def open_port(app: ServingApp, sock: socket.socket, *, epoch: int) -> AsyncIterator[ServingPort]:
    """Serve on the listening ``sock`` while inside.

    Raises:
        ServerEnded: the server did not start.
    """
    async with serve_http(app, sock) as server:
        try:
            yield ServingPort(app, server, epoch=epoch)
        finally:
            app.close_watches()
