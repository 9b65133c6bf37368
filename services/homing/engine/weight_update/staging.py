"""From named tensors to a model that can take over: fetched first, checked, then packed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from homing.engine.models import Model
from homing.engine.weight_update.arena import Arena
from homing.errors import InvalidRequest

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A model that waits for its turn, and what it took to make it."""

    model: Model
    num_parameters: int
    num_bytes: int
    """Of the parameters, in the engine's dtype."""
    transfer_s: float
    """Spent on getting them, and on copying what has to be copied."""
    check_s: float
    """Spent on looking for values that are not finite."""
    pack_s: float
    """Spent on the layout that the model computes with."""
    release_s: float
    """Spent on giving back the memory that they were in, afterwards."""


def stage(
    model: Model, tensors: Iterable[tuple[str, Tensor]], *, partial: bool, owned: bool = False
) -> StagedWeights:
    """A model with the parameters `tensors`, by their Hugging Face names, of any float dtype.

    partial: those that are not among them stay what they are in `model`; else all must be.
    owned: nobody changes them meanwhile, so what is of the engine's dtype needs no copy.

    Raises InvalidRequest for names, shapes, dtypes and values that cannot be right. `model` goes on
    computing, and nothing of `tensors` is referred to afterwards.
    """
    copier = _Copier(model, owned=owned)
    start = time.perf_counter()
    copier.add_all(tensors)
    copier.check_complete(partial=partial)
    fetched = time.perf_counter()
    num_parameters = len(copier.parameters)
    num_bytes = sum(tensor.nbytes for tensor in copier.parameters.values())
    updated = model.updated(copier.parameters)
    packed = time.perf_counter()
    copier.release()
    return StagedWeights(
        updated,
        num_parameters,
        num_bytes,
        transfer_s=fetched - start - copier.check_s,
        check_s=copier.check_s,
        pack_s=packed - fetched,
        release_s=time.perf_counter() - packed,
    )


def check_names(model: Model, shapes: Mapping[str, tuple[int, ...]], *, partial: bool) -> None:
    """The same checks, before there is any tensor."""
    copier = _Copier(model, owned=False)
    for name, shape in shapes.items():
        copier.check(name, shape)
    copier.check_complete(partial=partial)


class _Copier:
    def __init__(self, model: Model, *, owned: bool) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.check_s = 0.0
        self._shapes = model.parameter_shapes
        self._dtype = model.shape.dtype
        self._owned = owned
        # Twice the largest: a tied head may come beside the embedding that it is.
        shapes = list(self._shapes.values())
        shapes.append(max(shapes, key=math.prod))
        self._arena = Arena.of(shapes, [self._dtype] * len(shapes))
        self._seen: set[str] = set()
        self._tied_head: Tensor | None = None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        known = EMBEDDING if self._is_tied_head(name) else name
        if known not in self._shapes:
            raise InvalidRequest(f"the model has no parameter {name!r}")
        if name in self._seen:
            raise InvalidRequest(f"parameter {name!r} comes twice")
        if shape != self._shapes[known]:
            expected = list(self._shapes[known])
            raise InvalidRequest(f"{name} is {list(shape)}; the model's is {expected}")
        self._seen.add(name)

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.add(name, tensor)

    def release(self) -> None:
        """Give the tensors' memory back, which ends the mapping of a file."""
        self.parameters, self._tied_head = {}, None

    def add(self, name: str, tensor: Tensor) -> None:
        self.check(name, tuple(tensor.shape))
        if not tensor.is_floating_point():
            raise InvalidRequest(f"{name} is of {tensor.dtype}; it must be of a float dtype")
        copy = self._own(tensor.detach())
        start = time.perf_counter()
        if not _is_finite(copy):
            raise InvalidRequest(f"{name} has values that are not finite in {self._dtype}")
        self.check_s += time.perf_counter() - start
        if self._is_tied_head(name):
            self._tied_head = copy
        else:
            self.parameters[name] = copy

    def _own(self, tensor: Tensor) -> Tensor:
        """In the engine's dtype, and memory that nobody changes."""
        if self._owned and tensor.dtype == self._dtype:
            return tensor
        return self._arena.take(tuple(tensor.shape), self._dtype).copy_(tensor)

    def check_complete(self, *, partial: bool) -> None:
        missing = self._shapes.keys() - self._seen
        if missing and not partial:
            raise InvalidRequest(
                f"{len(missing)} of {len(self._shapes)} parameters are missing, such as "
                f"{min(missing)!r}; an update of some parameters must say that it is partial"
            )
        if not self._seen:
            raise InvalidRequest("the update has no parameters")
        if self._tied_head is not None:
            embedding = self.parameters.get(EMBEDDING)
            if embedding is None or not torch.equal(embedding, self._tied_head):
                raise InvalidRequest(
                    f"{HEAD} differs from {EMBEDDING}, but the model ties the two together"
                )

    def _is_tied_head(self, name: str) -> bool:
        """State dicts list a tied head beside the embedding that it is."""
        return name == HEAD and HEAD not in self._shapes


def _is_finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # NaN wins both
    return bool(torch.isfinite(low) & torch.isfinite(high))
