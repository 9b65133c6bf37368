"""The decoder of the Llama family on C kernels: one ctypes call a step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.kernels import c_structs
from homing.engine.kernels.packed import PackedLayer, PackedWeights
from homing.engine.kernels.packing import PANEL, PackedMatrix
from homing.engine.kv_cache import KVCache
from homing.engine.models import ModelShape
from homing.engine.models.checkpoint import DecoderWeights, parameter_shapes
from homing.engine.models.config import DecoderConfig
from homing.engine.models.rope import rope_tables

# As `enum dtype` in formats.h.
C_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.int8: 4,
}
C_FORMATS = {"fp8": 3, "int8": 4, "int4": 5}


def why_unsupported(config: DecoderConfig) -> str | None:
    """What keeps a model from running on the C kernels, in a few words; None if nothing does."""
    sizes = (config.head_dim, config.hidden_size, config.intermediate_size)
    if any(size % PANEL for size in sizes):
        return f"head, hidden or intermediate size is no multiple of {PANEL}"
    if len(set(config.windows)) > c_structs.MAX_WINDOWS:
        return f"more than {c_structs.MAX_WINDOWS} different attention windows"
    return None


class CDecoder:
    """See `homing.engine.models.Model`. Owns its packed weights, and the C workspace together with
    the models that it was updated to: they do not compute at the same time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        weights: PackedWeights,
        shape: ModelShape,
        num_threads: int,
        workspace: Workspace | None = None,
    ) -> None:
        self.shape = shape
        self.parameter_shapes: Mapping[str, tuple[int, ...]] = parameter_shapes(config)
        library.instructions.restype = ctypes.c_char_p
        self.instructions: str = library.instructions().decode()
        """What the kernels were compiled for: avx2, avx512_bf16, ..."""
        self._library = library
        self._config = config
        self._weights = weights
        self._num_threads = num_threads
        self._workspace = workspace or Workspace(library)
        self._rope = rope_tables(
            config.rope, head_dim=config.head_dim, num_positions=config.max_context_tokens
        )
        self._model = self._build_model()
        self._addresses: CacheAddresses | None = None

    @property
    def memory(self) -> Sequence[Tensor]:
        return list(self._weights.tensors)

    def updated(self, parameters: Mapping[str, Tensor]) -> CDecoder:
        # What was rounded is no longer of the model's dtype: in fp32 it is rounded to the same.
        dtype = torch.float32 if self._weights.quantization else self.shape.dtype
        overlay = _Overlay(parameters, self._config, self._weights, self.shape.dtype)
        merged = DecoderWeights(self._config, dtype, overlay, origin="the update")
        weights = self._weights.updated(self._config, merged, parameters.keys())
        return CDecoder(
            self._library,
            self._config,
            weights,
            self.shape,
            self._num_threads,
            self._workspace,
        )

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if self._addresses is None or self._addresses.cache is not cache:
            self._addresses = CacheAddresses(cache)
        addresses = self._addresses
        logits = torch.empty(len(batch.selected), self.shape.vocab_size)
        step = c_structs.Step(
            rows=len(batch.token_ids),
            num_selected=len(batch.selected),
            max_blocks=batch.block_tables.shape[1],
            block_size=cache.block_size,
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slot_mapping=batch.slot_mapping.data_ptr(),
            request_index=batch.request_index.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            selected=batch.selected.data_ptr(),
            keys=addresses.keys,
            values=addresses.values,
            logits=logits.data_ptr(),
        )
        self._library.run_step(
            ctypes.byref(self._model),
            ctypes.byref(step),
            self._workspace.pointer,
            self._num_threads,
        )
        return logits

    def _build_model(self) -> c_structs.Model:
        """Its pointers are good for as long as `self._weights` and `self._rope` live."""
        config, weights = self._config, self._weights
        cosines, sines = self._rope
        windows = sorted({window or 0 for window in config.windows})
        layers = (c_structs.Layer * config.num_layers)()
        for index, layer in enumerate(weights.layers):
            window_index = windows.index(config.windows[index] or 0)
            layers[index] = self._build_layer(layer, window_index)
        return c_structs.Model(
            embedding_dtype=C_DTYPES[weights.embedding.dtype],
            kv_dtype=C_DTYPES[self.shape.cache_dtype],
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_windows=len(windows),
            windows=(ctypes.c_int * c_structs.MAX_WINDOWS)(*windows),
            norm_eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            layers=layers,
            embedding=weights.embedding.data_ptr(),
            final_norm=weights.final_norm.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            head=_linear(weights.head),
        )

    def _build_layer(self, layer: PackedLayer, window_index: int) -> c_structs.Layer:
        return c_structs.Layer(
            attention_norm=layer.attention_norm.data_ptr(),
            query_norm=_pointer(layer.query_norm),
            key_norm=_pointer(layer.key_norm),
            mlp_norm=layer.mlp_norm.data_ptr(),
            qkv=_linear(layer.qkv, layer.qkv_bias),
            output=_linear(layer.output),
            gate_up=_linear(layer.gate_up),
            down=_linear(layer.down),
            window_index=window_index,
        )


class Workspace:
    """The C code's scratch memory; freed with this object."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.new_workspace.restype = ctypes.c_void_p
        self.pointer = ctypes.c_void_p(library.new_workspace())
        weakref.finalize(self, library.free_workspace, self.pointer)


class CacheAddresses:
    """A KV cache as the C code sees it. Kept from step to step: collecting the addresses of 60
    tensors takes as long as a layer."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.keys = _addresses(cache.keys)
        self.values = _addresses(cache.values)


class _Overlay(Mapping[str, Tensor]):
    """Hugging Face name -> the new tensor where there is one, else the old one, unpacked."""

    def __init__(
        self,
        new: Mapping[str, Tensor],
        config: DecoderConfig,
        old: PackedWeights,
        dtype: torch.dtype,
    ) -> None:
        self._new = new
        self._dtype = dtype
        self._old_layer = cache(lambda index: old.layer_parameters(config, index))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._new:
            return self._new[name].to(self._dtype)
        return self._old_layer(int(name.removeprefix("model.layers.").split(".")[0]))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._new)

    def __len__(self) -> int:
        return len(self._new)


def _linear(matrix: PackedMatrix, bias: Tensor | None = None) -> c_structs.Linear:
    dtype = C_FORMATS[matrix.format.name] if matrix.format else C_DTYPES[matrix.panels.dtype]
    return c_structs.Linear(
        packed=matrix.panels.data_ptr(),
        scales=_pointer(matrix.scales),
        bias=_pointer(bias),
        n=matrix.num_outputs,
        k=matrix.num_inputs,
        dtype=dtype,
        group=matrix.group,
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
