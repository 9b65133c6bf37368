"""The torch decoder on CUDA, with its decode steps as CUDA graphs.

Launching a decode step's few hundred kernels one by one takes the CPU longer than they take the
GPU. A graph launches all of them at once, but always on the same memory: it is captured for a
number of rows, its inputs are copied to where it reads them, and a batch of fewer rows is filled up
with rows that nobody looks at. All other steps run as they are.

A step is got ready in two parts: first everything but its tokens, which may be while the device
computes the step before, and then these.

Not yet verified on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from homing.engine.async_copies import pinned
from homing.engine.attention.flashinfer import FlashInferAttention
from homing.engine.attention.pages import padded
from homing.engine.batch import Batch
from homing.engine.kv_cache import KVCache
from homing.engine.models.llama import TorchDecoder

Capture: TypeAlias = Callable[
    [Callable[[], Tensor], torch.device], tuple[Callable[[], None], Tensor]
]
"""From a computation on fixed memory to what does it again, and where its result is then."""


def graph_sizes(num_graphs: int, largest: int) -> tuple[int, ...]:
    """Rows of the graphs, ascending: the largest, half of that, and so on down to 1. So padding
    less than doubles a batch, if there are enough."""
    sizes: list[int] = []
    while len(sizes) < num_graphs and (not sizes or sizes[-1] > 1):
        sizes.append(-(-sizes[-1] // 2) if sizes else largest)
    return tuple(reversed(sizes))


def capture_graph(
    compute: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    # On a stream of its own first: libraries get what they need at their first call, and a capture
    # bars that. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device, such as one that stages new weights.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = compute()
    return graph.replay, result


class GraphedDecoder:
    """See `homing.engine.models.Model`."""

    def __init__(
        self,
        model: TorchDecoder,
        attention: FlashInferAttention,
        sizes: Sequence[int],
        capture: Capture | None = None,
    ) -> None:
        """attention: the model's own; sizes: rows of the graphs, ascending; capture: None for
        CUDA's."""
        self.shape = model.shape
        self.parameter_shapes = model.parameter_shapes
        self._model = model
        self._attention = attention
        self._sizes = sizes
        self._capture = capture or capture_graph
        self._cache: KVCache | None = None
        self._graphs: dict[int, DecodeGraph] = {}  # number of rows -> graph, of `_cache`

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._model.memory

    def updated(self, parameters: Mapping[str, Tensor]) -> GraphedDecoder:
        """Its graphs are captured anew, each when it is first needed."""
        model = self._model.updated(parameters)
        return GraphedDecoder(model, self._attention, self._sizes, self._capture)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        replay = self.prepare(batch, cache)
        return self._model.forward(batch, cache) if replay is None else replay(batch.token_ids)

    def prepare(self, batch: Batch, cache: KVCache) -> Callable[[Tensor], Tensor] | None:
        """Get ready for a step whose tokens need not be known yet, behind all that the device was
        told to do until now. Returns what computes it, as the next step, given `batch.token_ids`;
        None if there is no graph for it."""
        num_rows = len(batch.token_ids)
        fitting = next((size for size in self._sizes if size >= num_rows), None)
        if fitting is None or not _is_decode(batch):
            return None
        graph = self._graph(fitting, cache)
        graph.prepare(batch)
        return graph.replay

    def warm_up(self, cache: KVCache) -> None:
        """Capture all graphs now, and compile the attention kernels, rather than in a request's
        time."""
        for size in reversed(self._sizes):
            self._graph(size, cache)

    def _graph(self, num_rows: int, cache: KVCache) -> DecodeGraph:
        if cache is not self._cache:
            self._cache, self._graphs = cache, {}
        if num_rows not in self._graphs:
            self._graphs[num_rows] = DecodeGraph(
                self._model, self._attention, cache, num_rows, self._capture
            )
        return self._graphs[num_rows]


class DecodeGraph:
    """Decode steps of up to `num_rows` requests on one cache."""

    @torch.inference_mode()
    def __init__(
        self,
        model: TorchDecoder,
        attention: FlashInferAttention,
        cache: KVCache,
        num_rows: int,
        capture: Capture,
    ) -> None:
        self._num_rows = num_rows
        self._block_size = cache.block_size
        pages_each = -(-model.shape.max_context_tokens // cache.block_size)
        self._attention = attention.for_graph(num_rows, num_rows * pages_each)
        idle = padded(no_rows(), num_rows, cache.block_size)
        self._attention.plan(idle, self._block_size)
        self._inputs = idle.to(model.shape.device)
        self._replay, self._logits = capture(
            lambda: model.compute(self._inputs, cache, self._attention), model.shape.device
        )

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> None:
        """All but the token ids."""
        # A replay that still runs reads the same memory, and these copies are behind it in its
        # stream. Nothing here waits for it: see `async_copies`.
        rows = padded(batch, self._num_rows, self._block_size)
        self._attention.plan(rows, self._block_size)
        _send(rows.positions, self._inputs.positions)
        _send(rows.slot_mapping, self._inputs.slot_mapping)

    @torch.inference_mode()
    def replay(self, token_ids: Tensor) -> Tensor:
        """Of what was last prepared. Logits that are overwritten by the next replay."""
        num_rows = len(token_ids)
        token_ids = torch.nn.functional.pad(token_ids, (0, self._num_rows - num_rows))
        _send(token_ids, self._inputs.token_ids)
        self._replay()
        return self._logits[:num_rows]


def no_rows() -> Batch:
    none = torch.empty(0, dtype=torch.int32)
    return Batch(none, none, none, none, block_tables=none.view(0, 1), selected=none)


def _send(source: Tensor, target: Tensor) -> None:
    target.copy_(pinned(source, target.device), non_blocking=True)


def _is_decode(batch: Batch) -> bool:
    """Each request has one row, and its logits are wanted."""
    return len(batch.block_tables) == len(batch.token_ids) == len(batch.selected)
