"""A trainer of two ranks that holds its model in shards, as FSDP2 does, for a test to command."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_RANKS = 2
ENGINE_RANKS = [0, 1]


@contextmanager
def sharded_trainer(model: Path, directory: Path) -> Iterator[list[Connection]]:
    """A pipe to each rank. Both take (what, parameter names or None); the first one answers.

    "broadcast" is answered by an `UpdateWeights`, and once more when "taken" is said; "step"
    changes all shards in place; "die" is a broadcast that ends with the process, in its middle.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_main, args=(theirs, rank, model, directory / "rendezvous"), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _main(pipe: Connection, rank: int, directory: Path, rendezvous: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS
    )
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    policy = _module_of(directory)
    for layer in policy.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    while True:
        what, names = pipe.recv()
        named = [(n, t) for n, t in policy.state_dict().items() if names is None or n in names]
        assert all(isinstance(tensor, DTensor) for _, tensor in named)
        if what == "step":
            for _, tensor in named:
                tensor.to_local().mul_(-1.5)
        elif rank == 0:
            _broadcast(pipe, named, partial=names is not None, dies=what == "die")
        else:
            _take_part(named)


def _module_of(directory: Path) -> Any:
    """With a checkpoint's parameters, and their names. transformers would take seconds to load."""
    from safetensors.torch import load_file
    from torch import nn

    root = nn.Module()
    for name, tensor in load_file(directory / "model.safetensors").items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor))
    return root


def _broadcast(pipe: Connection, named: list[Any], *, partial: bool, dies: bool) -> None:
    from homing.llm.weight_group import Gathered, broadcast_weights, gathered

    class Dying(Gathered):
        def __iter__(self) -> Iterator[Any]:
            for number, pair in enumerate(super().__iter__()):
                if number == 3:
                    os._exit(1)
                yield pair

    tensors = Dying(named) if dies else gathered(named)
    with broadcast_weights(tensors, ENGINE_RANKS, partial=partial, timeout_s=60) as update:
        pipe.send(update)
        assert pipe.recv() == "taken"
    pipe.send("over")


def _take_part(named: list[Any]) -> None:
    """In the gathering, which every rank of the trainer is needed for."""
    from homing.llm.weight_group import gathered

    for _ in gathered(named):
        pass
