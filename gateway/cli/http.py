"""The commands that ask the running gateway: who to ask, with which key, and what its refusals say."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from gateway.auth.keys import local_key
from gateway.auth.master import open_keyring
from gateway.cli.common import fail, open_store
from gateway.core.clock import SystemClock
from gateway.settings import Settings
from gateway.supervisor.plan import reachable_host
from gateway.supervisor.records import RunDir

TIMEOUT_S = 30.0


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

    def delete(self, path: str, **params: Any) -> Any:
        response = self._ask("DELETE", path, params=params)
        return response.json() if response.content else None

    def post(self, path: str, *, timeout_s: float = TIMEOUT_S) -> Any:
        return self._ask("POST", path, params={}, timeout_s=timeout_s).json()

    def upload(self, path: str, content: Path, media_type: str, **params: Any) -> Any:
        """Send a file as the body of a POST."""
        given = {name: value for name, value in params.items() if value is not None}
        with content.open("rb") as file:
            return self._ask("POST", path, params=given, file=file, media_type=media_type).json()

    def download(self, link: str, target: Path, *, size_bytes: int, sha256: str | None) -> None:
        """Fetch what a link leads to; one that was cut goes on where it ended. The file appears whole and checked."""
        partial = target.with_name(f"{target.name}.part")
        partial.parent.mkdir(parents=True, exist_ok=True)
        done = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={done}-"} if done else {}
        try:
            with httpx.stream("GET", link, headers=headers, timeout=TIMEOUT_S, trust_env=False) as answer:
                if not answer.is_success and done < size_bytes:
                    fail(f"{target.name}: the link was answered with {answer.status_code}")
                if answer.is_success:
                    with partial.open("ab" if answer.status_code == httpx.codes.PARTIAL_CONTENT.value else "wb") as out:
                        for chunk in answer.iter_bytes():
                            out.write(chunk)
        except httpx.HTTPError as error:
            fail(f"{target.name} was cut ({error or type(error).__name__}); the same command goes on from there")
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if partial.stat().st_size != size_bytes or sha256 not in (None, found):
            partial.unlink()
            fail(f"{target.name} is not what the gateway named; try again")
        partial.replace(target)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        file: IO[bytes] | None = None,
        media_type: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> httpx.Response:
        """Return the answer, or end the program with what the gateway said."""
        url = f"{self.base_url.rstrip('/')}/training/v1{path}"
        headers = {"Authorization": f"Bearer {self.api_key}"}
        if media_type is not None:
            headers["Content-Type"] = media_type
        try:
            response = httpx.request(
                method, url, params=params, json=body, content=file, headers=headers, timeout=timeout_s, trust_env=False
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
