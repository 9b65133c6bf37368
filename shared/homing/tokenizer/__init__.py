"""Text <-> token ids, chat templates, and text that grows token by token.

Shared by frontends and engines, so that both cut an answer at the same character. Imports neither
torch nor transformers.
"""

from homing.tokenizer.incremental import IncrementalDecoder
from homing.tokenizer.stop import StopMatcher
from homing.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopMatcher", "Tokenizer"]
