"""From logits to tokens, and to log-probabilities.

A row's token depends on its logits, its parameters, its seed and its position alone: the same bits
come out whatever rows accompany it. Heavy passes over the vocabulary run over all rows at once;
what differs from row to row works on the few candidates that are left.
"""

from homing.engine.sampling.sampler import Sampled, Sampler
from homing.engine.sampling.scoring import score

__all__ = ["Sampled", "Sampler", "score"]
