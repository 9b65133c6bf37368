"""Stands for the package flashinfer where there is no GPU.

The classes and functions that the engine calls, with the signatures of flashinfer-python 0.7.4, in
plain torch on the CPU. They see what the library would: what `run` computes follows from the index
arrays of the last `plan` alone, and with CUDA graphs from the buffers, whatever `plan` was given.
What a graph's `plan` schedules goes through a buffer of its own on the CPU, as in the library, and
is checked when it is used: on a `LateDevice` it may have been written again by then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from homing.engine import startup, weights
from homing.engine.models import graphed


class PagedWrapper:
    """What both wrappers have in common: pages, heads and a window."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "the workspace must be 0 at its first use"
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self.q_data_type: str | torch.dtype | None = None
        self.kv_data_type: str | torch.dtype | None = None
        self.qo_indptr = self.kv_indptr = self.kv_indices = self.last_page_len = torch.empty(0)

    def _plan_heads(
        self, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, window_left: int
    ) -> None:
        assert num_qo_heads % num_kv_heads == 0
        self.heads = (num_qo_heads, num_kv_heads, head_dim)
        self.page_size = page_size
        self.window_left = window_left

    def _run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        num_qo_heads, num_kv_heads, head_dim = self.heads
        assert q.is_contiguous()
        assert q.dtype == self.q_data_type
        assert q.shape == (int(self.qo_indptr[-1]), num_qo_heads, head_dim)
        for part in cache:
            assert part.dtype == self.kv_data_type
            assert part.shape[1:] == (self.page_size, num_kv_heads, head_dim)
        out = torch.empty_like(q)
        for request in range(len(self.last_page_len)):
            rows = slice(int(self.qo_indptr[request]), int(self.qo_indptr[request + 1]))
            out[rows] = self._attend(q[rows], cache, request)
        return out

    def _attend(self, q: Tensor, cache: tuple[Tensor, Tensor], request: int) -> Tensor:
        """Causal, aligned at the end: the last row sees the whole context."""
        start, end = self.kv_indptr[request : request + 2].tolist()
        pages = self.kv_indices[start:end].long()
        last = int(self.last_page_len[request])
        assert 1 <= last <= self.page_size
        context = (end - start - 1) * self.page_size + last
        group = q.shape[1] // cache[0].shape[2]
        keys, values = (
            part[pages].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
            for part in cache
        )
        positions = torch.arange(context - len(q), context)[:, None]
        distance = positions - torch.arange(context)
        hidden = distance < 0
        if self.window_left >= 0:
            hidden |= distance > self.window_left
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        assert use_tensor_cores, "the other kernels take few numbers of heads"
        self._buffers = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.kv_indptr = paged_kv_indptr_buffer
            self.kv_indices = paged_kv_indices_buffer
            self.last_page_len = paged_kv_last_page_len_buffer
            self._buffers = (self.kv_indptr, self.kv_indices, self.last_page_len)
            self._schedule_on_cpu = torch.zeros(len(self.last_page_len), dtype=torch.int32)
            self._schedule = torch.zeros_like(self._schedule_on_cpu)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        self._plan_heads(num_qo_heads, num_kv_heads, head_dim, page_size, window_left)
        self.q_data_type, self.kv_data_type = q_data_type, kv_data_type
        self.qo_indptr = torch.arange(len(last_page_len) + 1)
        given = (indptr, indices, last_page_len)
        check_pages(*given)
        if self._buffers is None:
            self.kv_indptr, self.kv_indices, self.last_page_len = given
            return
        assert len(last_page_len) == len(self._buffers[2]), "a graph's batch size is fixed"
        for buffer, new in zip(self._buffers, given, strict=True):
            buffer[: len(new)].copy_(new, non_blocking=True)
        self._schedule_on_cpu[:] = context_lengths(indptr, last_page_len, page_size)
        self._schedule.copy_(self._schedule_on_cpu, non_blocking=True)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None
    ) -> Tensor:
        if self._buffers is not None:
            lengths = context_lengths(self.kv_indptr, self.last_page_len, self.page_size)
            assert self._schedule.equal(lengths), "the schedule is another plan's"
        return self._run(q, paged_kv_cache)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        assert causal
        self._plan_heads(num_qo_heads, num_kv_heads, head_dim_qk, page_size, window_left)
        self.q_data_type, self.kv_data_type = q_data_type, kv_data_type
        check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert qo_indptr.dtype == torch.int32
        self.qo_indptr, self.kv_indptr = qo_indptr, paged_kv_indptr
        self.kv_indices, self.last_page_len = paged_kv_indices, paged_kv_last_page_len

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None
    ) -> Tensor:
        return self._run(q, paged_kv_cache)


def context_lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return (indptr.diff() - 1) * page_size + last_page_len


def check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
    for array in (indptr, indices, last_page_len):
        assert array.dtype == torch.int32
        assert array.device.type == "cpu", "planning would wait for the device"
    assert len(indptr) == len(last_page_len) + 1
    assert int(indptr[-1]) == len(indices)


def top_k_renorm_probs(
    probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False
) -> Tensor:
    assert is_deterministic
    assert isinstance(top_k, Tensor)
    assert top_k.dtype == torch.int32
    assert bool(((top_k > 0) & (top_k < probs.shape[-1])).all())
    ranked = probs.sort(dim=-1, descending=True).values
    least = ranked.gather(-1, (top_k.long() - 1)[:, None])
    return _renormalized(probs, least)


def top_p_renorm_probs(
    probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False
) -> Tensor:
    assert is_deterministic
    assert isinstance(top_p, Tensor)
    assert top_p.dtype == torch.float32
    assert bool(((top_p > 0) & (top_p < 1)).all())
    ranked = probs.sort(dim=-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    size = (before < top_p[:, None]).sum(-1, keepdim=True)
    return _renormalized(probs, ranked.gather(-1, size - 1))


def _renormalized(probs: Tensor, least: Tensor) -> Tensor:
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    package, sampling = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(package, wrapper.__name__, wrapper)
    for name in ("top_k_renorm_probs", "top_p_renorm_probs"):
        setattr(sampling, name, getattr(here, name))
    for module in (package, sampling):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines take FlashInfer and graphs on the CPU if they are asked to."""
    install(monkeypatch)
    monkeypatch.setattr(weights, "choose_attention", lambda asked, shape, machine: asked)
    monkeypatch.setattr(startup, "choose_sampling", lambda asked, device, machine: asked)
    monkeypatch.setattr(graphed, "capture_graph", Recorder().capture)


class Recorder:
    """Stands for CUDA graphs: a replay computes again, on the same memory."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(
        self, compute: Callable[[], Tensor], device: torch.device
    ) -> tuple[Callable[[], None], Tensor]:
        result = compute().clone()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(compute())

        return replay, result
