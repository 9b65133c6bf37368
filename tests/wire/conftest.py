"""Routers of both kinds: with compiled code and without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from homing.native import COMPILERS, default_cache_dir
from homing.transport import Router


@pytest.fixture(params=["in bursts", "one by one"])
def new_router(request) -> Callable[..., Router]:
    """Makes routers that receive and send as the coordinator's does, or as one where there is no
    compiler."""

    def make(address: str = "tcp://127.0.0.1:0", *, send_queue: int = 10) -> Router:
        in_bursts = request.param == "in bursts"
        if in_bursts and not any(map(shutil.which, COMPILERS)):
            pytest.skip("no C compiler: then there are no bursts, and the other kind is tested")
        cache_dir = default_cache_dir(os.environ) if in_bursts else None
        router = Router(address, send_queue=send_queue, cache_dir=cache_dir)
        assert (router._bursts is not None) is in_bursts
        return router

    return make
