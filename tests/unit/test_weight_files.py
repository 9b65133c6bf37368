"""Weights read from safetensors files, and staged in memory that is nobody else's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from homing.engine.weight_update import open_source, stage
from homing.engine.weight_update.arena import ALIGNMENT, Arena
from homing.engine.weight_update.files import (
    HEADER_BYTES,
    PIECE_BYTES,
    WeightFile,
    _lease,
    write_file,
)
from homing.errors import InvalidRequest
from homing.wire import UpdateWeights, WeightSource
from tests.support.backends import BACKENDS, load_backend
from tests.support.tiny_models import make_tiny_model

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save_by_hand(path: Path, tensors: dict[str, tuple[str, Tensor]]) -> Path:
    """In the order given, whatever that makes of their alignment."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, tensor) in tensors.items():
        raw = tensor.view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def read(path: Path, *, may_map: bool = True) -> dict[str, Tensor]:
    with WeightFile(path).opened(may_map=may_map) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


@pytest.mark.parametrize("may_map", [True, False])
def test_a_file_is_read_whole_whatever_its_float_dtypes(tmp_path: Path, may_map: bool) -> None:
    tensors = {name: torch.randn(3, 5).to(dtype) for name, dtype in DTYPES.items()}
    tensors["large"] = torch.randn(PIECE_BYTES // 2 + 7)
    tensors["empty"] = torch.empty(0, 4)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    assert WeightFile(path).shapes == {name: tuple(value.shape) for name, value in tensors.items()}
    there = read(path, may_map=may_map)
    assert there.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert there[name].dtype == tensor.dtype
        assert torch.equal(there[name], tensor)


@pytest.mark.parametrize("may_map", [True, False])
def test_tensors_may_lie_anywhere_in_a_file(tmp_path: Path, may_map: bool) -> None:
    odd, next_one = torch.randn(3).half(), torch.randn(4)
    path = save_by_hand(tmp_path / "odd", {"odd": ("F16", odd), "next": ("F32", next_one)})
    there = read(path, may_map=may_map)
    assert torch.equal(there["odd"], odd)
    assert torch.equal(there["next"], next_one)


def test_what_is_written_is_what_was_yielded_though_the_memory_is_used_again(
    tmp_path: Path,
) -> None:
    """As a trainer does that gathers each parameter in the same buffer."""
    buffer = torch.empty(6)

    def gather() -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate("abc"):
            yield name, buffer.fill_(number).view(2, 3)

    path = tmp_path / "model.safetensors"
    write_file(gather(), path)
    there = load_file(path)
    assert there.keys() == set("abc")
    for number, name in enumerate("abc"):
        assert torch.equal(there[name], torch.full((2, 3), float(number)))
        assert torch.equal(read(path)[name], there[name])


def test_any_layout_and_float_dtype_can_be_written(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3, 5).to(dtype).T for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    tensors["strided"] = torch.randn(10)[::2]
    tensors["tied"] = tensors["F32"]
    tensors["trained"] = torch.ones(2, requires_grad=True)
    path = tmp_path / "model.safetensors"
    write_file(tensors.items(), path)
    there = load_file(path)
    assert there.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(there[name], tensor)


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    path, one = tmp_path / "model.safetensors", torch.ones(1)
    with pytest.raises(InvalidRequest, match="parameter 'a' comes twice"):
        write_file([("a", one), ("a", one)], path)
    with pytest.raises(InvalidRequest, match=r"a is of torch\.int64; it must be of a float dtype"):
        write_file([("a", one.long())], path)
    with pytest.raises(InvalidRequest, match=r"names and shapes take .* room for 262,136"):
        write_file([("a" * HEADER_BYTES, one)], path)


def test_what_is_no_file_of_float_tensors_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    save_file({"a": torch.randn(100)}, whole)
    torn = tmp_path / "torn"
    torn.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(InvalidRequest, match="torn is not a safetensors file"):
        WeightFile(torn)
    integers = save_by_hand(tmp_path / "integers", {"a": ("I32", torch.ones(2).int())})
    with pytest.raises(InvalidRequest, match="a is of I32; it must be of a float dtype"):
        WeightFile(integers)


@pytest.mark.parametrize("still_open", [False, True])
def test_a_file_that_becomes_shorter_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, still_open: bool
) -> None:
    """Whether it is mapped, or read because somebody may still write to it."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(PIECE_BYTES // 2)}, path)
    file = WeightFile(path)
    with ExitStack() as stack:
        shortened = stack.enter_context(path.open("rb+"))
        shortened.truncate(PIECE_BYTES)
        if not still_open:
            shortened.close()
        with (
            pytest.raises(InvalidRequest, match=r"became shorter (before|while) it was read"),
            file.opened(may_map=True),
        ):
            pass


def test_while_a_file_is_mapped_nobody_can_change_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(5)}, path)
    with path.open("rb") as file:
        if not _lease(file):
            pytest.skip("this system gives no leases")
    with WeightFile(path).opened(may_map=True) as tensors:
        [(_, mapped)] = tensors
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        assert torch.equal(mapped, torch.ones(5))
    with path.open("rb+") as unlocked:  # though there is still a tensor of it
        assert unlocked.writable()
    with path.open("rb+") as writer, path.open("rb") as file:
        assert not _lease(file), "somebody may write to it"
        assert writer.writable()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_a_mapped_file_is_left_when_it_is_staged(tmp_path: Path, backend: str) -> None:
    directory = make_tiny_model("llama", tmp_path / "tiny")
    model = load_backend(directory, backend)
    update = UpdateWeights(source=WeightSource.DIRECTORY, path=str(directory))
    with open_source(update, model, None) as tensors:
        staged = stage(model, tensors, partial=False, owned=True)
    assert str(directory) not in Path("/proc/self/maps").read_text()
    assert staged.num_parameters == len(model.parameter_shapes)


def test_names_and_shapes_are_checked_before_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_backend(make_tiny_model("llama", tmp_path / "tiny"), "torch")
    path = tmp_path / "other"
    save_file({"model.norm.weight": torch.randn(3)}, path)
    monkeypatch.setattr(WeightFile, "opened", lambda *_, **__: pytest.fail("it was read"))
    update = UpdateWeights(source=WeightSource.SHARED_MEMORY, path=str(path), partial=True)
    with (
        pytest.raises(InvalidRequest, match=r"model\.norm\.weight is \[3\]; the model's is"),
        open_source(update, model, None),
    ):
        pass


def test_only_what_is_owned_and_of_the_engines_dtype_is_not_copied(tmp_path: Path) -> None:
    model = load_backend(make_tiny_model("llama", tmp_path / "tiny"), "torch")
    seen: list[dict[str, Tensor]] = []

    class Recorder:
        shape, parameter_shapes = model.shape, model.parameter_shapes

        def updated(self, parameters: dict[str, Tensor]) -> Recorder:
            seen.append(dict(parameters))
            return self

    name = "model.norm.weight"
    for dtype, owned in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True)):
        tensor = torch.ones(model.parameter_shapes[name], dtype=dtype)
        staged = stage(Recorder(), [(name, tensor)], partial=True, owned=owned)  # type: ignore[arg-type]
        assert staged.num_parameters == 1
        is_same = seen[-1][name].data_ptr() == tensor.data_ptr()
        assert is_same == (owned and dtype is torch.float32)
        assert torch.equal(seen[-1][name], torch.ones_like(seen[-1][name]))


def test_an_arena_gives_aligned_tensors_that_do_not_overlap() -> None:
    shapes, dtypes = [(3, 5), (7,), (0,), (2, 2)], [torch.float32, torch.bfloat16] * 2
    arena = Arena.of(shapes, dtypes)
    taken = [arena.take(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
        assert tensor.data_ptr() % ALIGNMENT == 0
    for number, tensor in enumerate(taken):
        assert torch.equal(tensor, torch.full_like(tensor, number))
