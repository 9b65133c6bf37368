"""Keys: who may speak with whom, where others can reach the network.

One key pair a role. An engine and a client know their own and the coordinator's public key; the
coordinator knows the public keys of both roles, and so which of them it speaks with. All traffic is
encrypted by CURVE. A key file says, a line each:

    role engine
    public ...        its own pair
    secret ...
    coordinator ...   another role's public key
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from homing.errors import ConfigError

COORDINATOR, ENGINE, CLIENT = ROLES = ("coordinator", "engine", "client")
KEY_CHARACTERS = 40  # 32 bytes in Z85


@dataclass(frozen=True)
class Keys:
    role: str
    public: bytes
    secret: bytes
    others: dict[str, bytes]
    """role -> public key. The coordinator's for an engine or a client; theirs for it."""


def write_keys(directory: Path) -> list[Path]:
    """Make a pair for each role and write a file for each that only this user can read. Raises
    `ConfigError` where there is one already."""
    pairs = {role: zmq.curve_keypair() for role in ROLES}
    public_of = {role: public for role, (public, _) in pairs.items()}
    peers_of = {COORDINATOR: (ENGINE, CLIENT), ENGINE: (COORDINATOR,), CLIENT: (COORDINATOR,)}
    paths = [directory / f"{role}.key" for role in ROLES]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, role in zip(paths, ROLES, strict=True):
            public, secret = pairs[role]
            fields = {"role": role.encode(), "public": public, "secret": secret}
            fields |= {peer: public_of[peer] for peer in peers_of[role]}
            text = "".join(f"{name} {value.decode()}\n" for name, value in fields.items())
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(path, flags, 0o600), "w") as file:
                file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is there already: keys are not overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {error.strerror}") from None
    return paths


def read_keys(path: Path, role: str) -> Keys:
    """The keys of a role, from its file or from the directory that holds it. Raises
    `ConfigError`."""
    if path.is_dir():
        path = path / f"{role}.key"
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{path} can be read by other users: chmod 600 it")
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read keys from {path}: {reason}") from None
    fields = dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2)
    if fields.get("role") != role:
        raise ConfigError(f"{path} is no key file of a {role}")
    keys = {name: value.encode() for name, value in fields.items() if name != "role"}
    needed = {"public", "secret", *((ENGINE, CLIENT) if role == COORDINATOR else (COORDINATOR,))}
    if keys.keys() != needed or any(len(key) != KEY_CHARACTERS for key in keys.values()):
        raise ConfigError(f"{path} is no whole key file: `homing keygen` writes one")
    public, secret = keys.pop("public"), keys.pop("secret")
    return Keys(role, public, secret, keys)


def connect_with(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that will connect encrypt, and prove whose it is."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.others[COORDINATOR])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
