"""The Flask application: OpenAI's routes, the operator's, and the page. `serving/server.py` runs it."""

import contextlib
import hmac
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic_core
from flask import Flask, Response, request
from flask_cors import CORS
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import HTTPException

from pagedjax.serving import streams
from pagedjax.serving.answer import Answer
from pagedjax.serving.backend import Backend
from pagedjax.serving.errors import ApiError, bad_body, bad_value, not_found
from pagedjax.serving.job import EngineError, Job, OverloadedError, UnavailableError
from pagedjax.serving.openapi import openapi_document
from pagedjax.serving.places import Places
from pagedjax.serving.pool_view import whole
from pagedjax.serving.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ForkRequest,
    TokenizeRequest,
)

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""What needs no API key, beside the page's files."""
PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client may do."""

    api_key: str | None = None
    max_calls: int = 256
    """Answers in the making; each has a thread."""
    max_watchers: int = 16
    """Streams of /engine/events; each has a thread too."""
    max_body_bytes: int = 4 * 2**20
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API; none by default, "*" for all."""


def create_app(backend: Backend, limits: Limits) -> Flask:
    """The application over a backend whose loop runs."""
    app = Flask("pagedjax", root_path=__file__.rpartition("/")[0], static_folder="web", static_url_path="/web")
    app.config["MAX_CONTENT_LENGTH"] = limits.max_body_bytes
    app.url_map.strict_slashes = app.url_map.merge_slashes = False  # which would redirect, in HTML
    if limits.cors_origins:
        CORS(app, origins=list(limits.cors_origins), allow_headers=["Authorization", "Content-Type"])
    _add_errors(app, backend)
    _add_key(app, limits.api_key)
    _add_openai_routes(app, backend, Places(limits.max_calls, "answers are in the making"))
    _add_engine_routes(app, backend, Places(limits.max_watchers, "clients watch the pool"))
    _add_operator_routes(app, backend)
    return app


def _add_openai_routes(app: Flask, backend: Backend, calls: Places) -> None:
    def answered(schema: type[Schema], begin: Callable[[Schema], tuple[Answer, Job]]) -> Response:
        give_back = calls.take()
        try:
            body = parsed(schema)
            with _bad_values():
                answer, job = begin(body)
            if body.stream:  # pyright: ignore[reportAttributeAccessIssue]
                return _streamed(answer, job, body.include_usage, give_back)  # pyright: ignore[reportAttributeAccessIssue]
            return _waited(answer, job, give_back)
        except BaseException:
            give_back()
            raise

    @app.post("/v1/completions")
    def completions() -> Response:
        return answered(CompletionRequest, backend.complete)

    @app.post("/v1/chat/completions")
    def chat_completions() -> Response:
        return answered(ChatCompletionRequest, backend.chat)

    @app.post("/engine/requests/<request_id>/fork")
    def fork(request_id: str) -> Response:
        give_back = calls.take()
        try:
            changes = parsed(ForkRequest, may_be_empty=True)
            with _bad_values():
                answer, job = backend.fork(request_id, changes)
            return _streamed(answer, job, False, give_back)
        except BaseException:
            give_back()
            raise

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [_model_card(backend)]}

    @app.get("/v1/models/<path:name>")
    def model(name: str) -> Any:
        backend.check_model(name)
        return _model_card(backend)

    @app.post("/tokenize")
    def tokenize() -> Any:
        body = parsed(TokenizeRequest)
        with _bad_values():
            token_ids = backend.tokenize(body)
        return {"count": len(token_ids), "max_model_len": backend.config.max_seq_len, "tokens": token_ids}

    @app.post("/detokenize")
    def detokenize() -> Any:
        body = parsed(DetokenizeRequest)
        backend.check_model(body.model)
        with _bad_values():
            return {"prompt": backend.detokenize(body.tokens)}


def _add_engine_routes(app: Flask, backend: Backend, watchers: Places) -> None:
    def take_picture() -> None:
        backend.loop.call(lambda engine: backend.loop.view.refresh(engine, now=True))

    @app.get("/engine/map")
    def memory_map() -> Any:
        take_picture()
        return whole(backend.loop.view.picture)

    @app.get("/engine/events")
    def events() -> Response:
        give_back = watchers.take()
        try:
            take_picture()
            is_gone, loop = _is_gone(), backend.loop
            response = _events(streams.watch(loop.view, lambda: is_gone() or loop.is_dead))
        except BaseException:
            give_back()
            raise
        response.call_on_close(give_back)
        return response

    @app.delete("/engine/requests/<request_id>")
    def abort(request_id: str) -> Any:
        if not backend.loop.abort_now(request_id):
            raise not_found(f"no unfinished request has the id {request_id!r}")
        return {"id": request_id, "aborted": True}


def _add_operator_routes(app: Flask, backend: Backend) -> None:
    loop = backend.loop

    @app.get("/health")
    def health() -> Any:
        if loop.is_healthy:
            return {"status": "ok"}
        return {"status": "dead" if loop.is_dead else "stuck"}, 503

    @app.get("/ready")
    def ready() -> Any:
        if loop.is_healthy and not loop.is_draining:
            return {"status": "ready"}
        return {"status": "draining" if loop.is_draining else "unhealthy"}, 503

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(backend.metrics.text(), mimetype="text/plain")

    @app.get("/openapi.json")
    def openapi() -> Any:
        return openapi_document(backend.model_name)

    @app.get("/")
    def page() -> Response:
        response = app.send_static_file("index.html")
        response.headers["Content-Security-Policy"] = PAGE_POLICY
        return response

    @app.after_request
    def note(response: Response) -> Response:
        backend.metrics.answered(response.status_code)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        return response


def _add_errors(app: Flask, backend: Backend) -> None:
    def as_response(error: ApiError, retry_after_s: int | None = None) -> Any:
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        return error.body(), error.status, headers

    @app.errorhandler(ApiError)
    def api_error(error: ApiError) -> Any:
        return as_response(error)

    @app.errorhandler(OverloadedError)
    def overloaded(error: OverloadedError) -> Any:
        return as_response(ApiError(429, f"too many requests: {error}", code="queue_full"), retry_after_s=1)

    @app.errorhandler(UnavailableError)
    def unavailable(error: UnavailableError) -> Any:
        return as_response(ApiError(503, str(error), code="unavailable"), retry_after_s=10)

    @app.errorhandler(EngineError)
    def failed(error: EngineError) -> Any:
        return as_response(ApiError(503 if backend.loop.is_dead else 500, str(error), code="engine_error"))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Any:
        status = error.code or 500
        text = f"{request.method} {request.path:.200}: {error.name.lower()}"
        if status == 413:
            text = f"the body has more than the {app.config['MAX_CONTENT_LENGTH']} bytes that this server takes"
        body, _, headers = as_response(ApiError(status, text, code=error.name.lower().replace(" ", "_")))
        headers |= {name: value for name, value in error.get_headers() if name == "Allow"}
        return body, status, headers

    @app.errorhandler(Exception)
    def internal_error(error: Exception) -> Any:
        logger.exception("%s %s failed", request.method, request.path, exc_info=error)
        return as_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def _add_key(app: Flask, api_key: str | None) -> None:
    if api_key is None:
        return

    @app.before_request
    def check_key() -> None:
        if request.path in OPEN_PATHS or request.path.startswith("/web/") or request.method == "OPTIONS":
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # WSGI's strings are bytes in disguise
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="bad_api_key")


def parsed(schema: type[Schema], may_be_empty: bool = False) -> Schema:
    """The body of the request that is handled, checked. ApiError 400 that names the field."""
    data = request.get_data(cache=False)
    if may_be_empty and not data:
        return schema()
    if request.mimetype != "application/json":
        raise ApiError(400, f"Content-Type must be application/json, got {request.mimetype!r:.80}", code="invalid_type")
    try:
        body = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise bad_body(error, body) from error


@contextlib.contextmanager
def _bad_values() -> Iterator[None]:
    """A ValueError of what a request asks for is the client's; elsewhere it would be ours."""
    try:
        yield
    except ValueError as error:
        raise bad_value(error) from error


def _is_gone() -> streams.IsGone:
    # Waitress knows; another server shows it when something is written, at the next heartbeat.
    return request.environ.get("waitress.client_disconnected", lambda: False)


def _streamed(answer: Answer, job: Job, include_usage: bool, give_back: Callable[[], None]) -> Response:
    response = _events(streams.stream(answer, job, include_usage, _is_gone()))
    # Also if the client goes before the generator has begun, when it has no `finally` to come to.
    response.call_on_close(job.close)
    response.call_on_close(give_back)
    return response


def _waited(answer: Answer, job: Job, give_back: Callable[[], None]) -> Response:
    try:
        outputs = streams.wait(job, _is_gone())
        body = pydantic_core.to_json({} if outputs is None else answer.whole(outputs))
        return Response(body, 499 if outputs is None else 200, mimetype="application/json")
    finally:
        job.close()
        give_back()


def _events(events: Any) -> Response:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(events, mimetype="text/event-stream", headers=headers)


def _model_card(backend: Backend) -> dict[str, Any]:
    limits = {"max_model_len": backend.config.max_seq_len, "created": backend.created}
    return {"id": backend.model_name, "object": "model", "owned_by": "pagedjax", **limits}
