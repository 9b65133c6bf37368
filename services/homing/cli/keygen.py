"""`homing keygen DIR`: keys for a fleet that others could reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class KeygenConfig:
    """Write coordinator.key, engine.key and client.key, each for its own processes alone."""

    directory: tyro.conf.Positional[Path]
    """Where to; it is made if need be. Files that are there are not overwritten."""


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(KeygenConfig, prog="homing keygen", args=argv)
    from homing.transport import write_keys

    for path in write_keys(config.directory):
        print(path)
    return 0
