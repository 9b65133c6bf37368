"""Paged attention by FlashInfer, on CUDA.

A wrapper of the library plans once a step, on the CPU, how its kernels share out the work, and runs
in every layer. Steps of decodes alone have a wrapper of their own: it can be captured in a CUDA
graph. A window is part of a plan, so layers of different windows have different wrappers.

Both kinds run the kernels of `fa2`: they run on every GPU from compute capability 8.0 on, at any
number of query heads for a head of keys, and are compiled at their first use, together.

A plan is copied to the device, behind what that still computes, from two places on the CPU:

- Its schedule from a pinned buffer that each wrapper has and writes again at its next plan. With
  a step planned while another runs, or after one that nobody waits for, that could be before the
  copy has been made: a fence, set between a plan's copies and the step's kernels, is waited for
  first. (mini-sglang met this race: https://github.com/sgl-project/mini-sglang/pull/103.)
- Its index arrays from the caller's memory. Into a graph's buffers, the pages' indices would be
  copied with the CPU waiting for the stream, and so for the step that runs, unless they are on the
  device already (https://github.com/flashinfer-ai/flashinfer/blob/main/flashinfer/decode.py): so
  they are sent there first, and the other arrays are pinned.

Written for flashinfer-python 0.5.3 to 0.7.4 (https://docs.flashinfer.ai/api/attention.html); not
yet verified on hardware.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from homing.engine.async_copies import Fence, pinned, sent
from homing.engine.attention.pages import Pages, pages_of
from homing.engine.batch import Batch
from homing.engine.models import ModelShape

WORKSPACE_BYTES = 256 * 2**20
"""FlashInfer recommends 128 MiB; splitting the work of large models takes up to 140 MB."""
KERNELS = "fa2"
LAYOUT = "NHD"  # [pages, page size, heads, head_dim], as the KV cache is
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)

Window: TypeAlias = int | None
"""Tokens that a row attends to, itself included; None: all before it."""
Wrapper: TypeAlias = Any
"""Of the library, which has no types to import where it is not installed."""


def why_unsupported(shape: ModelShape) -> str | None:
    """What keeps a model from FlashInfer's kernels, in a few words; None if nothing does."""
    if shape.dtype not in DTYPES:
        return "it computes in bf16 and fp16 alone"
    if shape.cache_dtype != shape.dtype:
        return "keys and values have the dtype of the weights there"
    if shape.head_dim not in HEAD_DIMS:
        return f"heads of {shape.head_dim} are none of {', '.join(map(str, HEAD_DIMS))}"
    return None


@dataclass(frozen=True)
class PagedHeads:
    """What every plan says of the model and its cache."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype

    @classmethod
    def of(cls, shape: ModelShape) -> PagedHeads:
        return cls(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.compute_dtype,
            shape.cache_dtype,
        )


class FlashInferAttention:
    """See `homing.engine.attention.Attention`. For steps of any shape."""

    def __init__(self, shape: ModelShape, windows: Iterable[Window]) -> None:
        library = _library()
        self.heads = PagedHeads.of(shape)
        self.windows = sorted(set(windows), key=lambda window: window or 0)
        # Split work is put together here; steps and graphs follow each other, and can share it.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._prefill = {
            window: library.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, LAYOUT, backend=KERNELS
            )
            for window in self.windows
        }
        self._decode = {
            window: library.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, LAYOUT, use_tensor_cores=True, backend=KERNELS
            )
            for window in self.windows
        }
        self._planned: Mapping[Window, Wrapper] = {}
        self._fence = Fence(shape.device)

    def plan(self, batch: Batch, block_size: int) -> None:
        pages = pages_of(batch, block_size)
        self._fence.wait()
        if pages.is_decode:
            self._planned = self._decode
            plan(self._decode, pages, self.heads)
        else:
            self._planned = self._prefill
            plan(self._prefill, pages, self.heads, pages.qo_indptr, causal=True)
        self._fence.set()

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, window: Window
    ) -> Tensor:
        return self._planned[window].run(queries, (keys, values))

    def for_graph(self, num_requests: int, max_pages: int) -> GraphAttention:
        return GraphAttention(self, num_requests, max_pages)


class GraphAttention:
    """See `homing.engine.attention.Attention`. For decodes of always the same number of requests:
    what a CUDA graph has captured finds each new plan in the same memory."""

    def __init__(self, eager: FlashInferAttention, num_requests: int, max_pages: int) -> None:
        """max_pages: of all requests together."""
        library = _library()
        self._device = eager.workspace.device
        self._heads = eager.heads
        self._fence = Fence(self._device)

        def buffer(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._device)

        self._wrappers: Mapping[Window, Wrapper] = {
            window: library.BatchDecodeWithPagedKVCacheWrapper(
                eager.workspace,
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=buffer(num_requests + 1),
                paged_kv_indices_buffer=buffer(max_pages),
                paged_kv_last_page_len_buffer=buffer(num_requests),
                backend=KERNELS,
            )
            for window in eager.windows
        }

    def plan(self, batch: Batch, block_size: int) -> None:
        """May be called while the device computes the step before, with this same graph."""
        pages = pages_of(batch, block_size)
        self._fence.wait()
        plan(self._wrappers, self._sent(pages), self._heads)
        self._fence.set()

    def _sent(self, pages: Pages) -> Pages:
        """See the top of the file."""
        return replace(
            pages,
            kv_indptr=pinned(pages.kv_indptr, self._device),
            kv_indices=sent(pages.kv_indices, self._device),
            last_page_len=pinned(pages.last_page_len, self._device),
        )

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, *, window: Window
    ) -> Tensor:
        return self._wrappers[window].run(queries, (keys, values))


def plan(
    wrappers: Mapping[Window, Wrapper], pages: Pages, heads: PagedHeads, *rows: Tensor, **more: bool
) -> None:
    """Of decodes; prefills have their `rows`, pages.qo_indptr, and are told to be causal."""
    for window, wrapper in wrappers.items():
        wrapper.plan(
            *rows,
            pages.kv_indptr,
            pages.kv_indices,
            pages.last_page_len,
            heads.num_qo_heads,
            heads.num_kv_heads,
            heads.head_dim,
            pages.block_size,
            window_left=_window_left(window),
            q_data_type=heads.q_data_type,
            kv_data_type=heads.kv_data_type,
            **more,
        )


def _window_left(window: Window) -> int:
    """Of the tokens before a row, how many it attends to; FlashInfer's -1 is all of them."""
    return -1 if window is None else window - 1


def _library() -> Any:
    return importlib.import_module("flashinfer")
