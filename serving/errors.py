"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}, always JSON."""

import re
from typing import Any

from pydantic import ValidationError

from pagedjax.serving.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, ForkRequest

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_FIELDS = {
    name
    for schema in (ChatCompletionRequest, CompletionRequest, DetokenizeRequest, ForkRequest)
    for name in schema.model_fields
}

LONGEST_MESSAGE = 1000
"""Characters: a client's own megabyte is not sent back to it."""


class ApiError(Exception):
    """What goes to the client in place of an answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."
        self.param = param if param is None else param[:LONGEST_MESSAGE]
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def not_found(message: str, param: str | None = None) -> ApiError:
    """404 for a thing that a request names."""
    return ApiError(404, message, param, f"{param}_not_found" if param else "not_found")


def bad_value(error: ValueError) -> ApiError:
    """400 for a ValueError, whose text begins with the name of the field."""
    message = " ".join(str(error).split())
    match = re.match(r"\w+", message)
    return ApiError(400, message, match[0] if match and match[0] in _FIELDS else None, "invalid_value")


def bad_body(error: ValidationError, body: Any) -> ApiError:
    """400 that names a field that is not what the schema says, by its path in the body."""
    found = error.errors(include_url=False, include_context=False)
    # Of a field that may have several types each says why not; the deepest is the one that was nearly right.
    param, value, first = max(
        ((*_place(each, body), each) for each in found), key=lambda place: place[0].count(".") + place[0].count("[")
    )
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: this server does not know this field", param, "unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: this field is required", param, "missing_field")
    if not param:
        return ApiError(400, f"the body must be a JSON object, got {body!r:.80}", None, "invalid_type")
    text = first["msg"].removeprefix("Value error, ")
    code = "invalid_type" if first["type"].endswith(("_type", "_parsing", "_from_float")) else "invalid_value"
    return ApiError(400, f"{param}: {text}, got {value!r:.80}", param, code)


def _place(error: Any, body: Any) -> tuple[str, Any]:
    """The path of an error's field in the body, as messages[0].content, and its value there."""
    path, value = "", body
    for part in error["loc"]:  # what is found nowhere is the name of one of the types that a field may have
        if isinstance(value, dict) and part in value:
            path, value = f"{path}.{part}", value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
    if error["type"] == "missing":
        path, value = f"{path}.{error['loc'][-1]}", None
    return path.removeprefix("."), value
