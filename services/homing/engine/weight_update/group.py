"""Receives what a trainer broadcasts in a process group of gloo.

The group is of this update alone, and no business of torch.distributed's own default group, which
an engine may use for something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from homing.engine.weight_update.arena import Arena
from homing.errors import InvalidRequest
from homing.wire import WeightGroup

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def receive(group: WeightGroup, group_rank: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors, in the order that was announced. Raises RuntimeError when the trainer or
    another engine is gone, or too late."""
    for info in group.tensors:
        if info.dtype not in _DTYPES:
            raise InvalidRequest(f"{info.name} is of {info.dtype}; it must be of a float dtype")
    timeout = timedelta(seconds=group.timeout_s)
    size = len(group.ranks) + 1
    # torch's stubs leave out these two, which its documentation lists.
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        group.host, group.port, size, is_master=False, timeout=timeout
    )
    store.set(f"ready/{group_rank}", "")
    members: Any = dist.ProcessGroupGloo(store, group_rank, size, timeout)
    dtypes = [_DTYPES[info.dtype] for info in group.tensors]
    arena = Arena.of([info.shape for info in group.tensors], dtypes)
    for info, dtype in zip(group.tensors, dtypes, strict=True):
        tensor = arena.take(info.shape, dtype)
        members.broadcast(tensor, 0).wait()
        yield info.name, tensor
