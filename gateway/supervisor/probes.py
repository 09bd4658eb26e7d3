"""Is a child ready? A probe is asked again and again until it first says yes."""

from collections.abc import Awaitable, Callable, Mapping

import httpx

Probe = Callable[[], Awaitable[bool]]

_TIMEOUT_S = 5.0


def answers(client: httpx.AsyncClient, url: str, headers: Mapping[str, str] | None = None) -> Probe:
    """Return a probe that says yes once GET ``url`` answers 200."""

    async def probe() -> bool:
        try:
            response = await client.get(url, headers=headers, timeout=_TIMEOUT_S)
        except httpx.TransportError:
            return False
        return response.status_code == 200

    return probe
