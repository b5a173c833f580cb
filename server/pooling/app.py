"""The ASGI application of a model that is pooled."""

from __future__ import annotations

from fastapi import FastAPI

from headway.pooling.async_pooling import AsyncPooling
from headway.server.limits.middleware import guard
from headway.server.openai.batches.lines import LineAnswers
from headway.server.openai.batches.routes import BatchRoutes
from headway.server.options import ServerOptions
from headway.server.pooling.routes import PoolingRoutes
from headway.version import __version__

OPEN_PATHS = frozenset(("/health", "/ping", "/metrics"))
"""Paths that need no API key: probes and scrapers carry none."""


def create_pooling_app(pooling: AsyncPooling, options: ServerOptions | None = None) -> FastAPI:
    """Make an ASGI application that does not shut down the model's engine. `app.state.routes` are its PoolingRoutes."""
    options = options or ServerOptions()
    app = FastAPI(title="Headway", version=__version__)
    routes = PoolingRoutes(pooling, options)
    answers = LineAnswers(routes.posts, routes.refuse, lambda: pooling.has_lost_engine)
    batches = BatchRoutes(options, answers, options.batch_concurrency or max(options.max_queue // 2, 1))
    app.state.routes = routes
    app.state.batches = batches
    app.state.line_answers = answers
    routes.add_to(app)
    batches.add_to(app)
    app.state.refused = routes.refused
    guard(app, options, OPEN_PATHS, app.state.refused)
    return app
