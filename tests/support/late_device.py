"""Stands for a GPU that is slow: what it is told to do happens when somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from homing.engine.attention import flashinfer
from homing.engine.models import graphed
from homing.engine.plan import StepPlan
from homing.engine.sampling import Sampled
from tests.support.overlapping import OverlappingRunner


class LateDevice(TorchFunctionMode):
    """One stream. While it is entered, copies that do not block are in it, and read their source
    when they come to it: as from pinned memory, the stricter kind. Replays of what `capture`
    captured are, too. All else is computed at once."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._stream: deque[Callable[[], object]] = deque()
        self._num_done = 0
        self._is_running = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_late = func.__name__ == "copy_" and kwargs.get("non_blocking") and not self._is_running
        if not is_late:
            return func(*args, **kwargs)
        target, source = args
        self._stream.append(lambda: target.copy_(source))
        return target

    def capture(
        self, compute: Callable[[], Tensor], device: torch.device
    ) -> tuple[Callable[[], None], Tensor]:
        self.finish()
        result = compute().clone()

        def replay() -> None:
            self.num_replays += 1
            self._stream.append(lambda: result.copy_(compute()))

        return replay, result

    def place(self) -> int:
        """Behind all that it was told to do until now."""
        return self._num_done + len(self._stream)

    @torch.inference_mode()
    def run_to(self, place: int) -> None:
        self._is_running = True
        while self._num_done < place:
            self._num_done += 1
            self._stream.popleft()()
        self._is_running = False

    def finish(self) -> None:
        self.run_to(self.place())


class LateRunner(OverlappingRunner):
    """Waits for its `LateDevice` before it looks at logits."""

    late_device: LateDevice

    def collect(self, plan: StepPlan, logits: Tensor) -> Sampled:
        self.late_device.finish()
        return super().collect(plan, logits)


def install(monkeypatch: pytest.MonkeyPatch, *, has_fences: bool = True) -> LateDevice:
    """For CUDA graphs, fences and a `LateRunner`. has_fences: waiting for them does wait."""
    device = LateDevice()

    class LateFence:
        def __init__(self, _: torch.device) -> None:
            self._place = 0

        def set(self) -> None:
            self._place = device.place()

        def wait(self) -> None:
            if has_fences:
                device.run_to(self._place)

    monkeypatch.setattr(graphed, "capture_graph", device.capture)
    monkeypatch.setattr(flashinfer, "Fence", LateFence)
    monkeypatch.setattr(LateRunner, "late_device", device, raising=False)
    return device
