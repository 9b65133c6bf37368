"""What a request asks for: types that the API, the wire and the engine share.

Knows nothing of sockets, tokenizers or tensors.
"""

from homing.params.sampling import SamplingParams
from homing.params.structured import Choice, Grammar, JsonSchema, Regex, StructuredOutput

__all__ = ["Choice", "Grammar", "JsonSchema", "Regex", "SamplingParams", "StructuredOutput"]
