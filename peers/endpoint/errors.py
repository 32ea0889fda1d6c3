"""Errors in the JSON form of OpenAI's interface."""

from typing import Any


class ApiError(Exception):
    """A request that is not served; the message is a sentence for the client."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        """The request's field at fault, if one is."""
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The reply's JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def deadline_error(seconds: float) -> ApiError:
    """The error of a request that took too long."""
    return ApiError(
        f"the request was not finished within {seconds:g} s; ask for fewer tokens, or let the "
        "endpoint's owner raise --deadline",
        status=504,
        kind="timeout_error",
        code="deadline",
    )
