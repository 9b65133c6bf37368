"""The shape of the repository: two portions of one namespace, and rules that know every package."""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTIONS = [ROOT / "services" / "homing", ROOT / "shared" / "homing"]
# Loads torch, or what loads it: the rule of who may not has everyone else.
COMPUTE = {"engine", "llm", "bench"}


def packages_in(portion: Path) -> set[str]:
    return {path.name for path in portion.iterdir() if path.is_dir() and path.name[0] not in "._"}


PACKAGES = set(chain.from_iterable(map(packages_in, PORTIONS)))


@pytest.fixture(scope="module")
def contracts() -> dict[str, dict]:
    """import-linter's contracts, by the first word that tells them apart."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        rules = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return {
        rule["forbidden_modules"][0] if "forbidden_modules" in rule else rule["type"]: rule
        for rule in rules
    }


@pytest.mark.parametrize("portion", PORTIONS, ids=lambda path: path.parent.name)
def test_a_portion_of_the_namespace_has_no_init_file(portion: Path) -> None:
    assert not (portion / "__init__.py").exists()
    assert not list(portion.glob("*.py"))


def test_no_name_is_in_both_portions() -> None:
    services, shared = map(packages_in, PORTIONS)
    assert not services & shared


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_is_a_package_and_typed(name: str) -> None:
    (path,) = [portion / name for portion in PORTIONS if (portion / name).exists()]
    assert (path / "__init__.py").exists()
    assert (path / "py.typed").exists()


def test_the_layers_list_every_package_once(contracts: dict[str, dict]) -> None:
    lines = contracts["layers"]["layers"]
    listed = [name.strip() for line in lines for name in line.replace("|", ":").split(":")]
    assert sorted(listed) == sorted(PACKAGES)


@pytest.mark.parametrize(
    ("library", "allowed"),
    [("torch", COMPUTE), ("zmq", {"transport"}), ("quart", {"frontend"})],
)
def test_a_library_is_forbidden_to_every_package_but_its_own(
    contracts: dict[str, dict], library: str, allowed: set[str]
) -> None:
    forbidden_to = contracts[library]["source_modules"]
    assert sorted(forbidden_to) == sorted(f"homing.{name}" for name in PACKAGES - allowed)
