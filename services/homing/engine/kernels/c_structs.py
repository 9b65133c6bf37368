"""The structs of `csrc/decoder.c` and `csrc/linear.h` in ctypes, field for field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int, c_void_p
from typing import ClassVar

MAX_WINDOWS = 2  # as in decoder.c


class Linear(Structure):
    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("n", c_int),
        ("k", c_int),
        ("dtype", c_int),
        ("group", c_int),
    ]


class Layer(Structure):
    _fields_: ClassVar = [
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("window_index", c_int),
    ]


class Model(Structure):
    _fields_: ClassVar = [
        ("embedding_dtype", c_int),
        ("kv_dtype", c_int),
        ("num_layers", c_int),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("hidden", c_int),
        ("intermediate", c_int),
        ("num_windows", c_int),
        ("windows", c_int * MAX_WINDOWS),
        ("norm_eps", c_float),
        ("scale", c_float),
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("head", Linear),
    ]


class Step(Structure):
    _fields_: ClassVar = [
        ("rows", c_int),
        ("num_selected", c_int),
        ("max_blocks", c_int),
        ("block_size", c_int),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("request_index", c_void_p),
        ("block_tables", c_void_p),
        ("selected", c_void_p),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("logits", c_void_p),
    ]
