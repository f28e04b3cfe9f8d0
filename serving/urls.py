"""Addresses of servers, as people give them to the commands that ask one."""

import httpx2


def server_url(url: str) -> str:
    """Where a server is, without the /v1 of its API. ValueError for what is no address."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"url must be a server's, such as http://127.0.0.1:8000, got {url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url must be a server's, such as http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")
