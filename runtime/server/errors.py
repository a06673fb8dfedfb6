"""``APIError``: a refusal or failure with its HTTP status, as OpenAI's error object or, on its routes, Anthropic's."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from qserve.runtime.client.failures import DeadlineExceeded, EngineFailure
from qserve.runtime.sampling import RequestError

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class APIError(Exception):
    """An answer that is an error. ``str(error)`` is the message; ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self, path: str = "") -> dict[str, Any]:
        """The error object in the shape of the API that ``path`` belongs to."""
        if path.startswith(ANTHROPIC_PATH):
            return {"type": "error", "error": self._anthropic()}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def _anthropic(self) -> dict[str, str]:
        """The error object of Anthropic's API. It has no field for ``param``, so the message names it."""
        message = str(self)
        if self.param and self.param not in message:
            message = f"{self.param}: {message}"
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": message}

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.body(path), status_code=self.status, headers=self.headers)


def as_api_error(error: Exception) -> APIError:
    """What a client is told about an error. About a defect of the server it is told only that there is one."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, DeadlineExceeded):
        # By default clients send a failed request again, but the time of this one is over.
        return APIError(408, str(error), param="timeout", code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, EngineFailure):
        return APIError(500, str(error))
    logger.error("a request failed", exc_info=error)
    return APIError(500, "the server failed on this request; its log says why")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""
