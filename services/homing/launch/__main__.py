"""`python -m homing.launch MODEL`: serve; under torchrun, as one rank of its job."""

from __future__ import annotations

import sys

import tyro

from homing.launch.config import LaunchConfig
from homing.launch.serve import serve
from homing.launch.torchrun.config import JobRank, TorchrunConfig
from homing.observe import run_main

PAIRS_OFF = (tyro.conf.FlagCreatePairsOff,)  # --verbose, without a --no-verbose


def main() -> int:
    job = JobRank.of()
    if job is None:
        return serve(tyro.cli(LaunchConfig, prog="homing serve", config=PAIRS_OFF))
    # It loads torch, which finds the other ranks.
    from homing.launch.torchrun.serve import serve_rank

    return serve_rank(tyro.cli(TorchrunConfig, prog="homing.launch", config=PAIRS_OFF), job)


if __name__ == "__main__":
    sys.exit(run_main(main))
