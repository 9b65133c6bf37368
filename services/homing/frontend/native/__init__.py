"""Token-in, token-out: SGLang's /generate and vLLM's /inference/v1/generate.

Both are read as a completion with other names, and answered in their own shapes.
"""

from homing.frontend.native.reply import GenerateReply, TokensReply
from homing.frontend.native.requests import (
    NativeRequest,
    own_names,
    read_generate,
    read_tokens,
)

__all__ = [
    "GenerateReply",
    "NativeRequest",
    "TokensReply",
    "own_names",
    "read_generate",
    "read_tokens",
]
