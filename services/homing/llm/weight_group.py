"""The trainer's side of an update by process group: it is rank 0, the engines are the others.

    with broadcast_weights(model.state_dict().items(), ranks=[0, 1]) as update:
        await llm.update_weights(update)

A sharded trainer calls `gathered` on all of its ranks, and broadcasts from one of them:

    tensors = gathered(model.state_dict().items())
    if dist.get_rank() == 0:
        with broadcast_weights(tensors, ranks=[0, 1]) as update:
            llm.update_weights(update)
    else:
        for _ in tensors:
            pass
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from homing.wire import InFlightKV, TensorInfo, UpdateWeights, WeightGroup, WeightSource

NamedTensors = Iterable[tuple[str, Tensor]]
POLL_S = 0.2


@contextmanager
def broadcast_weights(
    tensors: NamedTensors,
    ranks: Sequence[int],
    *,
    partial: bool = False,
    in_flight: InFlightKV | str = InFlightKV.KEEP,
    epoch: int | None = None,
    host: str = "127.0.0.1",
    timeout_s: float = 300.0,
) -> Iterator[UpdateWeights]:
    """An update to command in the block; the tensors are broadcast on a thread meanwhile.

    tensors: (Hugging Face parameter name, tensor). Names, dtypes and shapes are looked at first, so
    it is gone through twice unless it is what `gathered` returns.
    ranks: all live engine ranks; the update fails where another one is.
    host: an address of this machine that the engines reach. Whoever reaches it can join in their
    place: keep it inside a trusted network.

    Raises, at the end of the block, what the broadcast raised, unless the block did before.
    """
    named = tensors if isinstance(tensors, Gathered) else Gathered(list(tensors))
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    sender = _Sender(listener, host, named, len(ranks), timeout_s)
    group = WeightGroup(
        host=host, port=port, ranks=tuple(ranks), tensors=tuple(named.infos()), timeout_s=timeout_s
    )
    sender.start()
    try:
        yield UpdateWeights(
            source=WeightSource.GROUP,
            group=group,
            partial=partial,
            in_flight=InFlightKV(in_flight),
            epoch=epoch,
        )
    finally:
        sender.stop()
    if sender.error is not None:
        raise sender.error


class Gathered:
    """Whole tensors, one after the other, of those that may be sharded. To be gone through on every
    rank of the trainer, in the same order: gathering is a collective."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors = tensors

    def infos(self) -> Iterator[TensorInfo]:
        for name, tensor in self._tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield TensorInfo(name, dtype, tuple(tensor.shape))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield name, whole.detach().cpu().contiguous()


def gathered(tensors: NamedTensors) -> Gathered:
    return Gathered(list(tensors))


class _Sender(threading.Thread):
    """Waits for the engines, then broadcasts to them."""

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        tensors: Gathered,
        num_engines: int,
        timeout_s: float,
    ) -> None:
        super().__init__(name="homing-weight-broadcast", daemon=True)
        self.error: Exception | None = None
        self._tensors = tensors
        self._size = num_engines + 1
        self._timeout = timedelta(seconds=timeout_s)
        self._is_over = threading.Event()
        # The socket is bound already, to this address alone: by itself the store takes them all.
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            listener.getsockname()[1],
            self._size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def run(self) -> None:
        try:
            if self._engines_are_there():
                self._broadcast()
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """The update is answered: by now all is sent, or nobody waits for it."""
        self._is_over.set()
        self.join(timeout=10 * POLL_S)

    def _engines_are_there(self) -> bool:
        """False when the update ends before they came, because one of them refused it."""
        keys = [f"ready/{rank}" for rank in range(1, self._size)]
        while not self._is_over.is_set():
            try:
                self._store.wait(keys, timedelta(seconds=POLL_S))
            except dist.DistStoreError:
                continue
            return True
        return False

    @torch.no_grad()
    def _broadcast(self) -> None:
        members: Any = dist.ProcessGroupGloo(self._store, 0, self._size, self._timeout)
        for _, tensor in self._tensors:
            members.broadcast(tensor, 0).wait()
