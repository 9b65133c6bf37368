"""What one rank of a torchrun job is told: by flags, and by torchrun's environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from homing.errors import ConfigError
from homing.launch.config import LaunchConfig


@dataclass(frozen=True)
class JobRank:
    """A process's place in its job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    primary_host: str
    """Where the others reach the machine of global rank 0."""

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> JobRank | None:
        """As torchrun tells it by environment; None for a process that it did not start."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        try:
            return cls(
                rank=int(environ["RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", "0")),
                local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
                primary_host=environ.get("MASTER_ADDR", "localhost"),
            )
        except ValueError as error:
            raise ConfigError(f"torchrun's environment variables: {error}") from None

    @property
    def is_primary(self) -> bool:
        """The one that hosts the coordinator."""
        return self.rank == 0

    @property
    def num_threads(self) -> int:
        """CPU threads for this rank: its share of the machine's cores."""
        return max(1, len(os.sched_getaffinity(0)) // self.local_world_size)


@dataclass(frozen=True)
class TorchrunConfig:
    """Serve a model over HTTP by the ranks of a torchrun job: one engine on each."""

    launch: Annotated[LaunchConfig, OmitArgPrefixes, OmitSubcommandPrefixes]

    frontends: Literal["first-node", "every-node"] = "first-node"
    """Where HTTP is served: on the node of global rank 0, or on each. All lead to all engines."""

    def of_rank(self, job: JobRank) -> LaunchConfig:
        """The launch's settings with what the job decides. Raises ConfigError where they
        disagree."""
        config = self.launch
        if config.data_parallel_size not in (1, job.world_size):
            raise ConfigError(
                f"--data-parallel-size is {config.data_parallel_size}, but torchrun started "
                f"{job.world_size} ranks: leave it out"
            )
        return dataclasses.replace(
            config,
            data_parallel_size=job.world_size,
            num_threads=config.num_threads or job.num_threads,
        )

    def serves_http(self, job: JobRank) -> bool:
        """Whether this rank starts the frontends of its node."""
        return job.is_primary or (self.frontends == "every-node" and job.local_rank == 0)
