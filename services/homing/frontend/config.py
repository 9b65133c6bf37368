"""What one frontend process is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from homing.errors import ConfigError
from homing.frontend.parsers import answer_format


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Checked at construction; raises `ConfigError`."""

    coordinator: str
    """The coordinator's address, such as tcp://127.0.0.1:7000 or ipc:///run/homing/coordinator."""
    keys: Path | None = None
    """Key file, or its directory, of `homing keygen`, for a coordinator that asks for keys."""
    fd: int | None = None
    """A listening socket to take over from the parent, instead of host and port."""
    host: str = "127.0.0.1"
    """Address to listen on. Anyone who reaches it can use the model."""
    port: int = 5000
    """Port to listen on; 0 takes a free one and logs which."""
    tokenizer: str | None = None
    """Directory with tokenizer.json, instead of the one that the engines name."""
    served_model_name: tuple[str, ...] = ()
    """Names that the model answers to, instead of its own; the first is told to clients."""
    chat_template: str | None = None
    """A file with a Jinja chat template, instead of the model's own."""
    tool_call_parser: str | None = None
    """How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder or none. Without
    it: told from its chat template."""
    reasoning_parser: str | None = None
    """How the model marks its thoughts: qwen3, deepseek_r1, magistral, seed_oss or none. Without
    it: told from its chat template."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must give one of, besides those of the file and of HOMING_API_KEY. None:
    everybody is served."""
    api_key_file: str | None = None
    """File with a key on each line: unlike flags, other users of the machine cannot see it."""
    admin_api_key: str | None = None
    """Key for the control routes, else HOMING_ADMIN_API_KEY. Without one they work on loopback
    only."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use this server, such as https://app.example.org; * is any."""
    certfile: str | None = None
    """File with the certificate chain, PEM: serve HTTPS."""
    keyfile: str | None = None
    """File with the certificate's private key."""
    max_inflight: int = 4096
    """Unfinished generations of this process at most; beyond it requests get 429."""
    join_timeout_s: float = 300.0
    """How long to wait for a coordinator before giving up."""
    drain_s: float = 4.0
    """How long running requests may go on after SIGTERM."""
    lifeline_fd: int | None = None
    """Read end of a pipe from the parent; when it closes, this process stops."""
    verbose: bool = False
    """Log more."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535")
        if (self.certfile is None) != (self.keyfile is None):
            raise ConfigError("certfile and keyfile need each other")
        if self.max_inflight < 1:
            raise ConfigError(f"max_inflight is {self.max_inflight}; it must be at least 1")
        answer_format(
            None, tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser
        )
        for name in ("join_timeout_s", "drain_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")

    def read_api_keys(self) -> tuple[str, ...]:
        """All keys that clients may give. Raises `ConfigError` if the file cannot be read."""
        keys = [*self.api_key, os.environ.get("HOMING_API_KEY", "")]
        if self.api_key_file is not None:
            keys += read_text(self.api_key_file, "the file of API keys").splitlines()
        return tuple(key.strip() for key in keys if key.strip())

    def read_admin_keys(self) -> tuple[str, ...]:
        """The admin key, if there is one."""
        key = self.admin_api_key or os.environ.get("HOMING_ADMIN_API_KEY", "")
        return (key,) if key else ()


def read_text(path: str, name: str) -> str:
    """A file's text. Raises `ConfigError`, which calls the file by `name`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
