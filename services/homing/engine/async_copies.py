"""Copies from the CPU to a device that is still computing, where neither waits for the other.

All of them are in the one stream that computes. So a copy arrives behind the kernels of the steps
before, which have then read what it overwrites, and before those of the steps that follow. What is
left to watch is the CPU's side, which a copy may read long after the call:

- Pageable memory is read before the call returns, but that may wait for the stream
  (https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html). It will do for a step that
  is about to start, when the stream is empty; not for what is sent while one runs.
- Memory that is `pinned` here is written once, and torch hands it out again only when the copies
  from it are done (https://github.com/pytorch/pytorch/issues/130785).
- Pinned memory that a library keeps and writes again needs a `Fence` before each new writing.

Not yet verified on hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that can be on its way to the device while the CPU goes on; itself for the CPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, as soon as that comes to it."""
    return pinned(tensor, device).to(device, non_blocking=True)


class Fence:
    """A place in a device's stream. On a CPU nothing is ever on its way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Behind all that the device was told to do until now."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until the device has come there; not at all if it was never set."""
        if self._event is not None:
            self._event.synchronize()
