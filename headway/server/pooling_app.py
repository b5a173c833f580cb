"""The ASGI application of a model that is pooled."""

from __future__ import annotations

from fastapi import FastAPI

from headway.pooling.async_pooling import AsyncPooling
from headway.server.middleware import ApiKeyMiddleware, HostMiddleware, JsonMiddleware
from headway.server.options import ServerOptions
from headway.server.pooling_routes import PoolingRoutes
from headway.version import __version__

OPEN_PATHS = frozenset(("/health", "/ping", "/metrics"))
"""Paths that need no API key: probes and scrapers carry none."""


def create_pooling_app(pooling: AsyncPooling, options: ServerOptions | None = None) -> FastAPI:
    """Make an ASGI application that does not shut down the model's engine. `app.state.routes` are its PoolingRoutes."""
    options = options or ServerOptions()
    app = FastAPI(title="Headway", version=__version__)
    app.state.routes = PoolingRoutes(pooling, options)
    app.state.routes.add_to(app)
    if options.api_key is None:
        app.add_middleware(JsonMiddleware)
    app.add_middleware(ApiKeyMiddleware, api_key=options.api_key, open_paths=OPEN_PATHS)
    if options.allowed_hosts:
        app.add_middleware(HostMiddleware, allowed=options.allowed_hosts)
    return app
