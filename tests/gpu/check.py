"""`deploy/gpu_check.sh` runs this: does what computes on a GPU agree with what computes on a CPU?

`checks` says what is checked. A check that fails does not stop the others. One JSON object is
printed at the end, or when the time is up.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import torch

from homing.engine.weights import say
from tests.gpu.checks import CHECKS, Measured, Setup


class OutOfTime(BaseException):
    """No Exception: libraries catch those."""


def environment(device: torch.device) -> Measured:
    packages = ("torch", "flashinfer-python", "flashinfer-jit-cache", "homing")
    versions = {name: _version(name) for name in packages}
    gpu: Measured = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return {"python": platform.python_version(), "nvcc": shutil.which("nvcc"), **versions, **gpu}


def run_checks(setup: Setup, checks: dict[str, Callable[[Setup], Measured]]) -> list[Measured]:
    results: list[Measured] = []
    for name, check in checks.items():
        say(f"checking {name}")
        started = time.perf_counter()
        result: Measured = {"name": name, "ok": False}
        try:
            result |= {"measured": check(setup), "ok": True}
        except (Exception, OutOfTime) as error:
            traceback.print_exc()
            result["error"] = f"{type(error).__name__}: {error}"[:2000]
        result["seconds"] = round(time.perf_counter() - started, 1)
        results.append(result)
        if result.get("error", "").startswith(OutOfTime.__name__):
            break
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=int, default=420)
    parser.add_argument("--model", help="with heads of 64; without it the demo model")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(json.dumps({"ok": False, "error": f"torch {torch.__version__} finds no CUDA GPU"}))
        return 1
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(args.budget_s)
    device = torch.device("cuda", 0)
    results = run_checks(Setup(device, args.model), {name: CHECKS[name] for name in args.only})
    signal.alarm(0)
    is_ok = len(results) == len(args.only) and all(result["ok"] for result in results)
    report = {"ok": is_ok, "environment": environment(device), "checks": results}
    print(json.dumps(report, indent=2))
    return 0 if is_ok else 1


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    raise OutOfTime("the time is up")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
