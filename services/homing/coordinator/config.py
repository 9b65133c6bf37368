"""What a coordinator can be told; each field is a command-line flag."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from homing.coordinator.router import LoadUnit, RoutingConfig
from homing.coordinator.routing import POLICY_NAMES
from homing.errors import ConfigError
from homing.native import default_cache_dir


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Raises `ConfigError`, in one line, when it cannot work."""

    bind: str = "tcp://127.0.0.1:0"
    """Address for engines and clients, such as ipc:///run/homing/coordinator or tcp://127.0.0.1:7000.
    Port 0 takes a free one; the log says which. One that other machines reach needs `keys`."""
    keys: Path | None = None
    """Key file, or its directory, of `homing keygen`: only who has a key gets in, as what the key
    says, and all is encrypted."""
    policy: str = "prefix_affinity"
    """How a rank is chosen: prefix_affinity, longest_prefix, first_prefix_block, work,
    load_balanced or round_robin."""
    alpha: float = 0.5
    """Of prefix_affinity: what load weighs against the prefix. 0: only the prefix counts; at 1 a
    single request of imbalance across two ranks cancels a full hit."""
    routing_load: LoadUnit = "requests"
    """What counts as load: requests in flight, or their outstanding tokens, of which a long prompt
    that is not cached has more. Tokens suit prompts of mixed lengths. `work` measures by itself."""
    prefix_ttl_s: float = 300.0
    """Seconds after which a prompt that no request repeated is no longer believed to be cached.
    It is remembered for at least half of that."""
    max_index_entries: int = 1_000_000
    """Block hashes remembered, 18 to 137 bytes each: the less, the more of them one prompt brought.
    A long prompt has about 170. Beyond it the oldest half is forgotten."""
    max_queued_requests: int = 4096
    """Requests a rank may have in flight, queued and running. When every rank has that many,
    submissions are refused until one ends."""
    max_queued_tokens: int = 2**24
    """Tokens of the prompts of those requests. A rank that has so many gets no further one, however
    few requests they are."""
    max_clients: int = 4096
    """Clients at a time; more are refused."""
    send_queue: int = 16384
    """Messages that may wait for one peer. A peer that does not read that many is cut off."""
    heartbeat_s: float = 0.5
    """How often each peer and the coordinator show each other that they are alive."""
    heartbeat_timeout_s: float = 10.0
    """A peer that was silent for so long is taken for dead and its requests go elsewhere. One whose
    connection breaks is noticed within `heartbeat_s`."""
    record: Path | None = None
    """File to write all routing decisions to, for `homing bench route --trace FILE`."""
    lifeline_fd: int | None = None
    """Read end of a pipe; when its other end closes, the parent has died: stop at once."""
    verbose: bool = False
    """Log at DEBUG."""

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"policy is {self.policy!r}; there are {', '.join(POLICY_NAMES)}")
        _at_least("alpha", self.alpha, 0)
        _at_least("max_index_entries", self.max_index_entries, 2)
        for name in ("max_queued_requests", "max_queued_tokens", "max_clients", "send_queue"):
            _at_least(name, getattr(self, name), 1)
        for name in ("prefix_ttl_s", "heartbeat_s", "heartbeat_timeout_s"):
            _at_least(name, getattr(self, name), 0.001)
        _at_least("heartbeat_timeout_s", self.heartbeat_timeout_s, 2 * self.heartbeat_s)
        _check_address(self.bind, is_private=self.keys is None)

    @property
    def cache_dir(self) -> Path | None:
        """Where compiled code is kept; None: nowhere, so none is used."""
        try:
            return default_cache_dir(os.environ)
        except ConfigError:
            return None

    @property
    def routing(self) -> RoutingConfig:
        return RoutingConfig(
            policy=self.policy,
            alpha=self.alpha,
            load_unit=self.routing_load,
            prefix_ttl_s=self.prefix_ttl_s,
            max_index_entries=self.max_index_entries,
            max_requests=self.max_queued_requests,
            max_tokens=self.max_queued_tokens,
        )


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _check_address(address: str, *, is_private: bool) -> None:
    """Without keys nobody outside this machine may reach the socket."""
    transport, _, rest = address.partition("://")
    if transport == "ipc" and rest:
        return
    host = rest.rpartition(":")[0].strip("[]")
    if transport != "tcp" or not host:
        raise ConfigError(f"bind is {address!r}; it must be ipc://PATH or tcp://HOST:PORT")
    if is_private and host != "localhost" and not _is_loopback(host):
        raise ConfigError(
            f"bind is {address!r}: without --keys peers are not authenticated, so only loopback "
            "addresses and ipc:// are allowed; `homing keygen DIR` makes keys"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
