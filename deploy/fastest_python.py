#!/usr/bin/env python3
"""Print the Python to make the environment with: of the interpreters of this version on the PATH,
the fastest.

One that was built without profile-guided optimization, as pyenv builds it unless told otherwise,
takes a third more time for all that Homing does in Python than a distribution's own. The one that
runs this file is kept unless another is clearly faster. `make PYTHON=...` asks nobody.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time

CLEARLY = 0.85
"""Of the time that the one at hand takes."""

ROUNDS = 6
"""A machine's pace may change from one second to the next."""

VERSION = sys.version_info[:2]


class Record:
    __slots__ = ("name", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = str(number)


def measure() -> float:
    """CPU seconds, for objects made, read and sorted, as servers do all day."""
    start = time.process_time()
    records = [Record(number) for number in range(10_000)]
    records.sort(key=lambda record: record.name)
    assert {(record.name, record.number) for record in records}
    return time.process_time() - start


def tell() -> None:
    """What this interpreter is, for the one that asks."""
    can_make = importlib.util.find_spec("ensurepip") and sys.prefix == sys.base_prefix
    seconds = min(measure() for _ in range(10)) if can_make else None
    print(sys.executable, *VERSION, seconds)


def ask(python: str) -> tuple[str, float] | None:
    """Its path without links, and how long it takes; None if it is no choice."""
    command = [python, __file__, "--tell"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        executable, major, minor, seconds = told.stdout.rsplit(maxsplit=3)
        is_same = (int(major), int(minor)) == VERSION
        return (os.path.realpath(executable), float(seconds)) if is_same else None
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def fastest() -> str:
    own = os.path.realpath(sys.executable)
    names = ("python3", "python{}.{}".format(*VERSION))
    found = [shutil.which(name, path=folder) for folder in os.get_exec_path() for name in names]
    pythons = {os.path.realpath(path) for path in (own, *found) if path}
    seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        answers = [answer for answer in map(ask, sorted(pythons)) if answer]
        for python, took in answers:
            seconds[python] = min(took, seconds.get(python, took))
        pythons = {python for python, _ in answers}  # a wrapper around one is asked once
    best = min(seconds, key=seconds.__getitem__, default=own)
    return best if own not in seconds or seconds[best] < CLEARLY * seconds[own] else own


def main() -> None:
    if "--tell" in sys.argv:
        tell()
    else:
        print(fastest())


if __name__ == "__main__":
    main()
