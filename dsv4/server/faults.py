"""Faults: what is answered to a request that cannot be served, in OpenAI's form."""

from __future__ import annotations

import json

from starlette.responses import Response

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
AGAIN = (429, 503)  # the same request may succeed later


class Fault(Exception):
    """A request refused: HTTP status, one line of text, the field it is about, and a code for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        """{"error": {message, type, param, code}}"""
        error = {"message": self.message, "type": KINDS[self.status], "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        headers = {"retry-after": "1"} if self.status in AGAIN else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        # ASCII: a message may quote what is no valid Unicode.
        content = json.dumps(self.body()).encode()
        return Response(content, self.status, headers, media_type="application/json")


def wrong(param: str, expected: str, found: object) -> Fault:
    """400 for a field that holds something else than expected."""
    shown = repr(found)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return Fault(400, f"{param}: expected {expected}; found {shown}", param)
