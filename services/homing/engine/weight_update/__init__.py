"""New weights for a running engine.

    sources   where they come from
    files     safetensors files, in shared memory or not
    group     a process group in which the trainer is
    arena     the memory for them
    staging   copied, checked, and made into a model beside the one that serves

The engine swaps the models between two steps. Until then nothing of it is touched: whatever goes
wrong before, the old weights go on serving.
"""

from homing.engine.weight_update.sources import open_source
from homing.engine.weight_update.staging import StagedWeights, stage

__all__ = ["StagedWeights", "open_source", "stage"]
