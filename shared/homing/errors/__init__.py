"""Every error that Homing raises on purpose, as one tree.

    HomingError
    ├── InvalidRequest            the caller's input is wrong: fix it, do not retry
    │   ├── ContextLengthExceeded     prompt (and answer) do not fit the model's context
    │   └── ModelNotFound             no such model is served here
    ├── Overloaded                every queue is full: retry after `retry_after_s`
    ├── Unavailable               no engine can answer now: retry after `retry_after_s`
    │   └── RequestLost               its engines died, twice
    ├── NotAllowed                a control command that the fleet's state does not allow
    ├── CommandFailed             a control command that some rank could not carry out
    ├── ConfigError               a process was started with settings that cannot work
    ├── WireError                 bytes from a peer are not a message: drop them, count them
    ├── LoanGone                  what a peer lent cannot be seen from here: have it sent
    └── InternalError             our bug: report it

Nothing here knows of HTTP: the frontend maps each class to a status, once.
"""

from __future__ import annotations

__all__ = [
    "CommandFailed",
    "ConfigError",
    "ContextLengthExceeded",
    "HomingError",
    "InternalError",
    "InvalidRequest",
    "LoanGone",
    "ModelNotFound",
    "NotAllowed",
    "Overloaded",
    "RequestLost",
    "Unavailable",
    "WireError",
]


class HomingError(Exception):
    """Root of the tree. Catch this to catch whatever Homing raises on purpose."""


class InvalidRequest(HomingError, ValueError):
    """Wrong input. Fix the named field; sending the same again fails again."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    """The tokens do not fit the model's context. Shorten the prompt or the answer."""


class ModelNotFound(InvalidRequest):
    """The named model is not served here. Ask `/v1/models` for the names that are."""


class Overloaded(HomingError):
    """A bounded queue is full. Nothing was started; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(HomingError):
    """No engine can answer now. Nothing is running; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestLost(Unavailable):
    """Each engine that was given this request died. It may be what kills them: look first."""


class NotAllowed(HomingError):
    """The fleet's state does not allow this command. Bring it to the state the text names."""


class CommandFailed(HomingError):
    """Some rank could not carry out a command; the text says which and why. Weights that could not
    be updated are on every rank what they were before."""


class ConfigError(HomingError):
    """A process cannot run with these settings. One line says which and why; exit non-zero."""


class WireError(HomingError):
    """A peer sent bytes that are not a message. The loop counts, drops and goes on."""


class LoanGone(HomingError):
    """What a peer lent was taken back, or lies on another machine. Have it sent."""


class InternalError(HomingError):
    """A bug of ours. The request ends; the process goes on if its state is sound."""
