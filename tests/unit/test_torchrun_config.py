"""What a rank makes of its flags and of torchrun's environment."""

from __future__ import annotations

import pytest

from homing.errors import ConfigError
from homing.launch.config import LaunchConfig
from homing.launch.torchrun.config import JobRank, TorchrunConfig

ENVIRON = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
}


def job(rank: int = 0, local_rank: int = 0) -> JobRank:
    return JobRank(rank, 4, local_rank, 2, "node0")


def test_torchrun_tells_a_rank_its_place() -> None:
    assert JobRank.of(ENVIRON) == job(3, 1)
    assert JobRank.of({}) is None
    with pytest.raises(ConfigError, match="torchrun's environment variables"):
        JobRank.of({**ENVIRON, "RANK": "x"})


def test_each_rank_is_one_engine() -> None:
    config = TorchrunConfig(LaunchConfig(num_threads=1)).of_rank(job())
    assert (config.data_parallel_size, config.num_threads) == (4, 1)
    with pytest.raises(
        ConfigError, match="--data-parallel-size is 3, but torchrun started 4 ranks"
    ):
        TorchrunConfig(LaunchConfig(data_parallel_size=3)).of_rank(job())


def test_frontends_are_on_the_first_node_or_on_each() -> None:
    places = [(0, 0), (1, 1), (2, 0), (3, 1)]
    first = TorchrunConfig(LaunchConfig())
    each = TorchrunConfig(LaunchConfig(), frontends="every-node")
    assert [first.serves_http(job(*place)) for place in places] == [True, False, False, False]
    assert [each.serves_http(job(*place)) for place in places] == [True, False, True, False]
