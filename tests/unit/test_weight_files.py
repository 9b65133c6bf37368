"""Weights read from safetensors files, and staged in memory that is nobody else's."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from homing.engine.weight_update import open_source, stage
from homing.engine.weight_update.arena import ALIGNMENT, Arena
from homing.engine.weight_update.files import PIECE_BYTES, WeightFile, _lease
from homing.errors import InvalidRequest
from homing.wire import UpdateWeights, WeightSource
from tests.support.backends import load_backend
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


def test_a_file_is_read_whole_whatever_its_float_dtypes(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3, 5).to(dtype) for name, dtype in DTYPES.items()}
    tensors["large"] = torch.randn(PIECE_BYTES // 2 + 7)
    tensors["empty"] = torch.empty(0, 4)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    file = WeightFile(path)
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    read = dict(file.read())
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_tensors_may_lie_anywhere_in_a_file(tmp_path: Path) -> None:
    odd, next_one = torch.randn(3).half(), torch.randn(4)
    path = save_by_hand(tmp_path / "odd", {"odd": ("F16", odd), "next": ("F32", next_one)})
    read = dict(WeightFile(path).read())
    assert torch.equal(read["odd"], odd)
    assert torch.equal(read["next"], next_one)


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
        with pytest.raises(InvalidRequest, match=r"became shorter (before|while) it was read"):
            list(file.read())


def test_while_a_file_is_mapped_nobody_can_shorten_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(10))
    with path.open("rb") as file:
        if not _lease(file):
            pytest.skip("this system gives no leases")
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
    with path.open("rb+") as unlocked:
        unlocked.truncate(5)
    with path.open("rb+") as writer, path.open("rb") as file:
        assert not _lease(file), "somebody may write to it"
        assert writer.writable()


def test_names_and_shapes_are_checked_before_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_backend(make_tiny_model("llama", tmp_path / "tiny"), "torch")
    path = tmp_path / "other"
    save_file({"model.norm.weight": torch.randn(3)}, path)
    monkeypatch.setattr(WeightFile, "read", lambda file: pytest.fail("it was read"))
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
