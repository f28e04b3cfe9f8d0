"""Requests drawn from our OpenAPI document, good and bad: no 5xx, each answer as documented, nothing leaks.

FUZZ_EXAMPLES=N draws up to N requests of each operation, beside those that cover each field.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from serving_cases import client_of, serving

from pagedjax.serving.openapi import openapi_document
from pagedjax.serving.server import Server

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
GOOD = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}

CHECKED = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# The document as it is, and without /engine/events, whose answer has no end.
schema = schemathesis.openapi.from_dict(openapi_document("tiny")).exclude(path="/engine/events")
num_requests: Counter[str] = Counter()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all; `serving` looks at the end whether anything is left."""
    with serving() as server, client_of(server) as client:
        before = client.post("/v1/completions", json=GOOD).json()["choices"]
        yield server
        assert client.post("/v1/completions", json=GOOD).json()["choices"] == before
        print(f"{sum(num_requests.values())} requests: {dict(sorted(num_requests.items()))}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")  # schemathesis does
@schema.parametrize()
@settings(
    max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
def test_requests_from_the_openapi_document(case: Case, server: Server) -> None:
    response = case.call(base_url=server.url)
    num_requests[str(response.status_code)] += 1
    case.validate_response(response, checks=CHECKED)
