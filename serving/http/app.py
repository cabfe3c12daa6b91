"""The Ray Serve application: one deployment that holds the engine and answers HTTP."""

import asyncio
import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client

from serving.http.auth import check_bind
from serving.http.routes import create_app
from serving.http.service import Service
from serving.settings import MAX_ONGOING_REQUESTS


class Generator:
    """A replica: `user_config` says which checkpoint it serves."""

    def __init__(self, api_key: str | None) -> None:
        self._service = Service()
        self._following: asyncio.Task[None] | None = None
        self._api_key = api_key or os.environ.get("API_KEY")
        check_bind(_http_host(), self._api_key)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Returns the ASGI app; Ray Serve calls it once, after the constructor."""
        return create_app(self._service, api_key=self._api_key)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Loads what `user_config` asks for while requests run. Only the first one may fail."""
        await self._service.update(user_config)
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Looks for a new best checkpoint from time to time, for as long as the replica lives."""
        while True:
            await asyncio.sleep(self._service.follow_interval_s)
            await self._service.follow()

    def check_health(self) -> None:
        """Makes Ray Serve refuse a replica without a checkpoint, and replace one whose engine is dead."""
        if not self._service.has_model:
            raise ValueError("there is no checkpoint to serve: set user_config as serving/config.yaml does.")
        self._service.engine()

    def __del__(self) -> None:
        """Ray Serve calls it once the requests that the replica had are answered, or their time is over."""
        if self._following is not None:
            self._following.cancel()
        self._service.close()


def build_app(args: dict[str, Any]) -> serve.Application:
    """Returns the application for `serve deploy` and `serve run`.

    Args:
        args: A `user_config`, for `serve run serving.http.app:build_app checkpoint=DIR`. With `serve deploy`
            leave it empty and write `user_config` into the file: only that can change while it runs.
    """
    api_key = os.environ.get("API_KEY")  # of the process that deploys; a replica may have one of its own
    decorate = serve.deployment(name="generator", max_ongoing_requests=MAX_ONGOING_REQUESTS, user_config=args or None)
    deployment: serve.Deployment = decorate(serve.ingress()(Generator))
    return deployment.bind(api_key)


def _http_host() -> str | None:
    """Where Ray Serve's proxies listen; Ray has no public call for it."""
    client = _get_global_client()
    assert client is not None, "a replica has a controller"
    host: str | None = client.http_config.host
    return host
