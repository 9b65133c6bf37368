"""New weights as a caller has them, made into what engines can read.

Engines in other processes read a directory, or a file in shared memory: that is where tensors of
this process are copied, once, so nothing that engines serve is the caller's any more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from homing.llm.model_files import ModelLike, is_path
from homing.wire import InFlightKV, UpdateWeights, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor]]"
WeightsLike: TypeAlias = "str | PathLike[str] | UpdateWeights | NamedTensors | Any"
"""A Hugging Face directory; (parameter name, tensor) pairs, or a mapping of them; a torch module;
or an `UpdateWeights`, such as one from a process group in which this process is rank 0."""

SHARED_MEMORY = Path("/dev/shm")


def given_or_own(source: WeightsLike | None, model: ModelLike) -> WeightsLike:
    """The source that was given, or else the model that engines were made with, as it is now."""
    if source is not None:
        return source
    if is_path(model) and not (model and Path(model).is_dir()):
        raise ValueError("update_weights: name a source; this model is a file, and stays as it is")
    return model


@contextmanager
def weight_update(
    source: WeightsLike, *, partial: bool, in_flight: InFlightKV | str, epoch: int | None
) -> Iterator[UpdateWeights]:
    """What to tell the fleet. A file that is made for it is gone when the block ends."""
    how = {"partial": partial, "in_flight": InFlightKV(in_flight), "epoch": epoch}
    if isinstance(source, UpdateWeights):
        yield source
    elif isinstance(source, str | PathLike):
        directory = Path(fspath(source)).expanduser().resolve()
        yield UpdateWeights(source=WeightSource.DIRECTORY, path=str(directory), **how)
    else:
        # It loads torch, which the other sources do without.
        from homing.engine.weight_update.files import write_file

        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="homing-weights-", dir=place) as directory:
            file = Path(directory, "model.safetensors")
            write_file(named_tensors(source), file)
            yield UpdateWeights(source=WeightSource.SHARED_MEMORY, path=str(file), **how)


def named_tensors(source: Any) -> NamedTensors:
    """The pairs of a module, a mapping or an iterable of pairs."""
    if hasattr(source, "state_dict"):
        source = source.state_dict()
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, Iterable):
        return source
    raise ValueError(
        f"the weights are of type {type(source).__name__}; they must be a directory, (name, "
        "tensor) pairs, a mapping of them or a torch module"
    )
