"""The commands that ask the running gateway: who to ask, with which key, and what its refusals say."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.auth.keys import local_key
from gateway.auth.master import open_keyring
from gateway.cli.common import fail, open_store
from gateway.core.clock import SystemClock
from gateway.settings import Settings
from gateway.supervisor.plan import reachable_host
from gateway.supervisor.records import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A running gateway as the CLI sees it: the native REST surface and one key."""

    base_url: str
    api_key: str

    def get(self, path: str, **params: Any) -> Any:
        params = {name: value for name, value in params.items() if value is not None}
        return self._ask("GET", path, params=params).json()

    def get_text(self, path: str, **params: Any) -> str:
        return self._ask("GET", path, params={name: value for name, value in params.items() if value is not None}).text

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask("PUT", path, params={}, body=body).json()

    def delete(self, path: str) -> Any:
        response = self._ask("DELETE", path, params={})
        return response.json() if response.content else None

    def _ask(
        self, method: str, path: str, *, params: Mapping[str, Any], body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Return the answer, or end the program with what the gateway said."""
        url = f"{self.base_url.rstrip('/')}/training/v1{path}"
        headers = {"Authorization": f"Bearer {self.api_key}"}
        try:
            response = httpx.request(
                method, url, params=params, json=body, headers=headers, timeout=30.0, trust_env=False
            )
        except httpx.HTTPError as error:
            fail(f"no answer from {self.base_url} ({error or type(error).__name__}). Does `loopline up` run?")
        if response.is_success:
            return response
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{url} answered {response.status_code}: is this a Loopline gateway?"
        fail(str(message))


def find_gateway(settings: Settings, base_url: str | None, api_key: str | None) -> Gateway:
    """Return the gateway to ask; what was not given comes from the data directory."""
    if base_url is None:
        address = RunDir(settings.data_dir).address() if settings.data_dir.is_dir() else None
        base_url = address.url if address else f"http://{reachable_host(settings.host)}:{settings.port}"
    if api_key is None:
        api_key = asyncio.run(_local_key(settings))
    if api_key is None:
        fail("no key: give one with --api-key or LOOPLINE_API_KEY (the local key was revoked)")
    return Gateway(base_url=base_url, api_key=api_key)


async def _local_key(settings: Settings) -> str | None:
    if settings.master_key is None and not settings.resolved_master_key_file.exists():
        fail(f"{settings.data_dir} has no master key yet: start `loopline up` first, or give --base-url and --api-key")
    async with open_store(settings) as database, database.write() as unit:
        return await local_key(unit, open_keyring(settings), at=SystemClock().now())
