"""Routers of both kinds: with compiled code and without."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from homing.native import default_cache_dir
from homing.transport import Router


@pytest.fixture(params=["in bursts", "one by one"])
def new_router(request) -> Callable[..., Router]:
    """Makes routers that receive and send as the coordinator's does, or as one where there is no
    compiler."""

    def make(address: str = "tcp://127.0.0.1:0", *, send_queue: int = 10) -> Router:
        cache_dir = default_cache_dir(os.environ) if request.param == "in bursts" else None
        router = Router(address, send_queue=send_queue, cache_dir=cache_dir)
        if cache_dir and router._bursts is None:
            router.close()
            pytest.skip("no C compiler")
        return router

    return make
