"""The decoder of the Llama family on C kernels: packs the weights, then one ctypes call a step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from homing.engine.batch import Batch
from homing.engine.kernels import c_structs
from homing.engine.kernels.packing import PANEL, interleave_gate_up, pack
from homing.engine.kv_cache import KVCache
from homing.engine.models import ModelShape
from homing.engine.models.checkpoint import Checkpoint, LayerWeights
from homing.engine.models.config import DecoderConfig
from homing.engine.models.rope import rope_tables

C_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def why_unsupported(config: DecoderConfig, dtype: torch.dtype) -> str | None:
    """What keeps a model from running on the C kernels, in a few words; None if nothing does."""
    sizes = (config.head_dim, config.hidden_size, config.intermediate_size)
    if dtype not in C_DTYPES:
        return f"no kernels for {dtype}"
    if any(size % PANEL for size in sizes):
        return f"head, hidden or intermediate size is no multiple of {PANEL}"
    if len(set(config.windows)) > c_structs.MAX_WINDOWS:
        return f"more than {c_structs.MAX_WINDOWS} different attention windows"
    return None


class CDecoder:
    """See `homing.engine.models.Model`. Owns the packed weights and the C workspace."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        num_threads: int,
        on_layer: Callable[[int], None],
    ) -> None:
        self.shape: ModelShape = config.shape(dtype)
        self._library = library
        self._num_threads = num_threads
        self._tensors: list[Tensor] = []  # keeps alive what the C structs point to
        self._model = self._build_model(config, checkpoint, on_layer)
        library.new_workspace.restype = ctypes.c_void_p
        self._workspace = ctypes.c_void_p(library.new_workspace())
        weakref.finalize(self, library.free_workspace, self._workspace)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
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
            keys=_pointers(cache.keys),
            values=_pointers(cache.values),
            logits=logits.data_ptr(),
        )
        self._library.run_step(
            ctypes.byref(self._model), ctypes.byref(step), self._workspace, self._num_threads
        )
        return logits

    def _build_model(
        self, config: DecoderConfig, checkpoint: Checkpoint, on_layer: Callable[[int], None]
    ) -> c_structs.Model:
        windows = sorted({window or 0 for window in config.windows})
        layers = (c_structs.Layer * config.num_layers)()
        for index, weights in enumerate(checkpoint.layers(on_layer)):
            window_index = windows.index(config.windows[index] or 0)
            layers[index] = self._build_layer(weights, window_index)
        cosines, sines = rope_tables(
            config.rope, head_dim=config.head_dim, num_positions=config.max_context_tokens
        )
        return c_structs.Model(
            dtype=C_DTYPES[self.shape.dtype],
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
            embedding=self._keep(checkpoint.embedding()),
            final_norm=self._keep(checkpoint.final_norm().float()),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
            head=self._linear(checkpoint.head()),
        )

    def _build_layer(self, weights: LayerWeights, window_index: int) -> c_structs.Layer:
        return c_structs.Layer(
            attention_norm=self._keep(weights.attention_norm.float()),
            query_norm=self._keep_optional(weights.query_norm),
            key_norm=self._keep_optional(weights.key_norm),
            mlp_norm=self._keep(weights.mlp_norm.float()),
            qkv=self._linear(weights.qkv, weights.qkv_bias),
            output=self._linear(weights.output),
            gate_up=self._linear(interleave_gate_up(weights.gate_up)),
            down=self._linear(weights.down),
            window_index=window_index,
        )

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> c_structs.Linear:
        outputs, inputs = weight.shape
        return c_structs.Linear(
            packed=self._keep(pack(weight)),
            bias=self._keep_optional(bias),
            n=outputs,
            k=inputs,
        )

    def _keep_optional(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor.float())

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._tensors.append(tensor)
        return tensor.data_ptr()


def _pointers(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
