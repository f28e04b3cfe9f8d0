"""The OpenAPI document at /openapi.json, made of the schemas that check the requests."""

from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pagedjax.serving import schemas

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        name: {"type": "integer", "minimum": 0} for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _answer(kind: str, choice: Json) -> Json:
    return _object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices={"type": "array", "items": choice},
        usage=_USAGE,
    )


_TEXT = {"type": "string"}
_INT = {"type": "integer", "minimum": 0}
_EVENT = {"description": "Of each event.", **_object(data=_TEXT)}
_FINISH = {"type": "string", "enum": ["stop", "length", "abort"]}
_LOGPROBS = {"type": ["object", "null"]}
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_INT, owned_by=_TEXT, max_model_len=_INT)
_ANSWERS: dict[str, Json] = {
    "completion": _answer(
        "text_completion", _object(index=_INT, text=_TEXT, finish_reason=_FINISH, logprobs=_LOGPROBS)
    ),
    "chat": _answer(
        "chat.completion",
        _object(
            index=_INT,
            message=_object(role={"const": "assistant"}, content=_TEXT),
            finish_reason=_FINISH,
            logprobs=_LOGPROBS,
        ),
    ),
}


def _responses(good: Json, *statuses: int, stream: bool = False) -> Json:
    content = {"application/json": {"schema": good}}
    if stream:
        content["text/event-stream"] = {"schema": _EVENT}
    error = {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": {"description": "The answer.", "content": content}} | {str(status): error for status in statuses}


def _operation(summary: str, responses: Json, body: type[BaseModel] | None = None, required: bool = True) -> Json:
    operation: Json = {"summary": summary, "responses": responses}
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        operation["requestBody"] = {"required": required, "content": content}
    return operation


def _with_id(operation: Json) -> Json:
    id_in_path = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {**operation, "parameters": [id_in_path]}


@lru_cache
def openapi_document(model_name: str) -> Json:
    """The API of a server of this model, in OpenAPI 3.1."""
    bodies = (
        schemas.CompletionRequest,
        schemas.ChatCompletionRequest,
        schemas.TokenizeRequest,
        schemas.DetokenizeRequest,
        schemas.ForkRequest,
    )
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    bad = (400, 401, 404, 413)
    busy = (*bad, 429, 500, 503)
    complete = _responses(_ANSWERS["completion"], *busy, stream=True)
    chat = _responses(_ANSWERS["chat"], *busy, stream=True)
    tokens = _object(count=_INT, max_model_len=_INT, tokens={"type": "array", "items": _INT})
    stream = {"200": {"description": "A stream.", "content": {"text/event-stream": {"schema": _EVENT}}}}
    errors = {status: answer for status, answer in _responses({}, *busy).items() if status != "200"}
    paths: Json = {
        "/v1/completions": {"post": _operation("Continue prompts.", complete, schemas.CompletionRequest)},
        "/v1/chat/completions": {"post": _operation("Answer a conversation.", chat, schemas.ChatCompletionRequest)},
        "/v1/models": {
            "get": _operation(
                "The model.",
                _responses(_object(object={"const": "list"}, data={"type": "array", "items": _MODEL}), 401),
            )
        },
        "/tokenize": {"post": _operation("Token ids of text.", _responses(tokens, *bad), schemas.TokenizeRequest)},
        "/detokenize": {
            "post": _operation("Text of token ids.", _responses(_object(prompt=_TEXT), *bad), schemas.DetokenizeRequest)
        },
        "/engine/map": {"get": _operation("What each KV block holds.", _responses({"type": "object"}, 401, 503))},
        "/engine/events": {
            "get": _operation("The same, as it changes.", {**stream, **_only(errors, "401", "429", "503")})
        },
        "/engine/requests/{request_id}/fork": {
            "post": _with_id(
                _operation("Go on from where a request is.", {**stream, **errors}, schemas.ForkRequest, required=False)
            )
        },
        "/engine/requests/{request_id}": {
            "delete": _with_id(_operation("Abort a request.", _responses({"type": "object"}, 401, 404, 503)))
        },
        "/health": {"get": _operation("Whether the engine lives.", _responses({"type": "object"}, 503))},
        "/ready": {"get": _operation("Whether requests are taken.", _responses({"type": "object"}, 503))},
        "/metrics": {"get": _operation("For Prometheus.", {"200": {"description": "Text.", "content": _PLAIN}})},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"pagedjax: {model_name}", "version": version("pagedjax")},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_PLAIN = {"text/plain": {"schema": _TEXT}}


def _only(responses: Json, *statuses: str) -> Json:
    return {status: responses[status] for status in statuses}
