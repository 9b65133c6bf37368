"""What a request asks for: types that the API, the wire and the engine share.

Knows nothing of sockets, tokenizers or tensors.
"""

from homing.params.sampling import SamplingParams

__all__ = ["SamplingParams"]
