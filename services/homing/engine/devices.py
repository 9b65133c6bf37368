"""Where an engine computes, and with what: what a user asks for, and what the machine has.

    device   attention            sampling
    cpu      cpu (C kernels)      torch
             torch                torch
    cuda     flashinfer           flashinfer, torch
             torch                flashinfer, torch

What is not asked for is chosen: CUDA where there is a GPU, and FlashInfer where it is installed and
serves the model. What is asked for and cannot be had is a ConfigError that names what would help.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass

import torch

from homing.engine.attention import flashinfer
from homing.engine.config import AttentionBackend, SamplingBackend
from homing.engine.models import CPU, ModelShape
from homing.errors import ConfigError

log = logging.getLogger(__name__)

INSTALL = "pip install 'homing[cuda]'"


@dataclass(frozen=True)
class Machine:
    """What there is."""

    num_gpus: int
    has_flashinfer: bool

    @classmethod
    def here(cls) -> Machine:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(num_gpus, importlib.util.find_spec("flashinfer") is not None)


def choose_device(
    asked: str, machine: Machine, *, rank: int | None = None, needs_cpu: bool = False
) -> torch.device:
    """asked: auto, cpu, cuda or cuda:N; needs_cpu: something else was asked for that only a CPU
    has. Ranks share out the GPUs, in order."""
    if asked == "cpu" or (asked == "auto" and (needs_cpu or not machine.num_gpus)):
        return CPU
    match = re.fullmatch(r"auto|cuda(?::(\d+))?", asked)
    if not match:
        raise ConfigError(f"--device is {asked!r}; it must be auto, cpu, cuda or cuda:N")
    if not machine.num_gpus:
        raise ConfigError(
            f"--device {asked}: torch {torch.__version__} finds no GPU here: choose --device cpu, "
            "or install a driver and a build of torch for CUDA"
        )
    index = int(match[1]) if match[1] else (rank or 0) % machine.num_gpus
    if index >= machine.num_gpus:
        raise ConfigError(f"--device {asked}: there are {machine.num_gpus} GPUs, from cuda:0 on")
    return torch.device("cuda", index)


def choose_attention(
    asked: AttentionBackend | None, shape: ModelShape, machine: Machine
) -> AttentionBackend | None:
    """None, on a CPU alone: the C kernels where they can be had."""
    if shape.device.type == "cpu":
        if asked == "flashinfer":
            raise ConfigError(
                "--attention-backend flashinfer needs a GPU: leave it out, or choose cpu or torch"
            )
        return asked
    if asked == "cpu":
        raise ConfigError(
            "--attention-backend cpu is for --device cpu: choose that, or leave it out"
        )
    if asked == "torch":
        return asked
    reason = flashinfer.why_unsupported(shape)
    fix = "choose --attention-backend torch, or other --dtype and --kv-cache-dtype"
    if reason is None and not machine.has_flashinfer:
        reason, fix = "the package is missing", INSTALL
    if reason is None:
        return "flashinfer"
    if asked == "flashinfer":
        raise ConfigError(f"--attention-backend flashinfer: {reason}: {fix}")
    log.warning("running the slow attention in torch: for FlashInfer, %s: %s", reason, fix)
    return "torch"


def choose_sampling(
    asked: SamplingBackend | None, device: torch.device, machine: Machine
) -> SamplingBackend:
    if asked == "torch" or (asked is None and (device.type == "cpu" or not machine.has_flashinfer)):
        return "torch"
    if device.type == "cpu":
        raise ConfigError(
            "--sampling-backend flashinfer needs a GPU: leave it out, or choose torch"
        )
    if not machine.has_flashinfer:
        raise ConfigError(f"--sampling-backend flashinfer: the package is missing: {INSTALL}")
    return "flashinfer"


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody has yet."""
    return torch.cuda.mem_get_info(device)[0]
