"""A file of requests through the server, in the format of OpenAI's batch API: a JSONL of requests in, a JSONL of
responses out, in the order in which they end. Each line has the `custom_id` of its request.

    pip install 'pagedjax[serve]'
    pagedjax serve smollm2-135m-instruct &
    python examples/batch_file.py requests.jsonl responses.jsonl [--url http://127.0.0.1:8000] [--concurrency 64]

A request is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}.
A full server says 429, and when to come again (Retry-After); then the request waits. Exit status 1: some failed.
"""

import argparse
import asyncio
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any, TextIO

import httpx2

MAX_TRIES = 8


def read_requests(file: TextIO) -> list[dict[str, Any]]:
    """The requests of a file. ValueError that names the line and what is wrong with it."""
    requests: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            name, method, url, body = (request[field] for field in ("custom_id", "method", "url", "body"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is not a request: {type(error).__name__}: {error}") from error
        if (
            not isinstance(name, str)
            or method != "POST"
            or not str(url).startswith("/v1/")
            or not isinstance(body, dict)
            or body.get("stream")
        ):
            raise ValueError(
                f"line {number}: expected a custom_id and a POST to /v1/... with a body that does not stream"
            )
        if name in requests:
            raise ValueError(f"line {number}: custom_id {name!r} stands there twice")
        requests[name] = request
    return list(requests.values())


async def answer(http: httpx2.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    """A line of the output, whatever comes of the request."""
    response, error = None, None
    for attempt in range(MAX_TRIES):
        try:
            got = await http.post(request["url"], json=request["body"])
        except httpx2.TransportError as problem:
            error = {"code": "connection_error", "message": f"{type(problem).__name__}: {problem}"}
            wait_s = 2.0**attempt
        else:
            response = {"status_code": got.status_code, "request_id": uuid.uuid4().hex, "body": json_of(got)}
            error = None
            if got.status_code not in (429, 503):
                break
            after = got.headers.get("Retry-After", "")
            wait_s = float(after) if after.isdigit() else 2.0**attempt
        if attempt + 1 < MAX_TRIES:
            await asyncio.sleep(min(wait_s, 60.0))
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request["custom_id"]}
    return {**line, "response": None if error else response, "error": error}


def json_of(response: httpx2.Response) -> Any:
    """The body; as text if a proxy has put something else in its place."""
    try:
        return response.json()
    except ValueError:
        return response.text


async def run(requests: list[dict[str, Any]], output: TextIO, url: str, concurrency: int) -> int:
    """Writes each response as soon as it is there; how many requests failed."""
    key = os.environ.get("PAGEDJAX_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    places = asyncio.Semaphore(concurrency)
    num_failed = 0

    async def one(http: httpx2.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
        async with places:
            return await answer(http, request)

    limits = httpx2.Limits(max_connections=concurrency)
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as http:
        for ended in asyncio.as_completed([one(http, request) for request in requests]):
            line = await ended
            num_failed += line["error"] is not None or line["response"]["status_code"] != 200
            print(json.dumps(line, ensure_ascii=False), file=output, flush=True)
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    args = parser.parse_args()
    try:
        with args.input.open(encoding="utf-8") as file:
            requests = read_requests(file)
        with args.output.open("w", encoding="utf-8") as output:
            num_failed = asyncio.run(run(requests, output, args.url, args.concurrency))
    except (ValueError, OSError) as error:
        print(f"{args.input}: {error}", file=sys.stderr)
        return 2
    print(f"{len(requests) - num_failed} of {len(requests)} requests succeeded", file=sys.stderr)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
