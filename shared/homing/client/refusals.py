"""From a refusal on the wire to the error that its consumer gets."""

from __future__ import annotations

from homing.errors import HomingError, InvalidRequest, Overloaded, Unavailable
from homing.wire import Lost, LostReason

MAY_PASS = (LostReason.NO_RANK, LostReason.OVERLOADED)
"""Refusals that another try may not meet."""


def error_of(lost: Lost) -> HomingError:
    if lost.reason is LostReason.OVERLOADED:
        return Overloaded(lost.detail, retry_after_s=lost.retry_after_s)
    if lost.reason is LostReason.INVALID:
        return InvalidRequest(lost.detail)
    return Unavailable(
        lost.detail or "no engine is serving", retry_after_s=max(1.0, lost.retry_after_s)
    )
