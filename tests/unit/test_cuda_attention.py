"""What FlashInfer is told, literally; and models on a stand-in for it, beside the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from homing.engine.attention.flashinfer import FlashInferAttention, why_unsupported
from homing.engine.attention.pages import padded, pages_of
from homing.engine.batch import Batch
from homing.engine.models import ModelShape
from homing.engine.models.checkpoint import Checkpoint
from homing.engine.models.config import read_config
from homing.engine.models.graphed import GraphedDecoder, graph_sizes
from homing.engine.models.llama import TorchDecoder
from tests.support import fake_flashinfer
from tests.support.batches import Driver, int32
from tests.support.fake_flashinfer import Recorder
from tests.support.tiny_families import VOCAB_SIZE
from tests.support.tiny_models import make_tiny_model

PROMPTS = [list(range(20, 57)), list(range(90, 95)), list(range(200, 216))]


def decode_batch() -> Batch:
    """Two requests, at positions 4 and 11 of blocks of 4."""
    return Batch(
        token_ids=int32([50, 60]),
        positions=int32([4, 11]),
        slot_mapping=int32([3 * 4, 5 * 4 + 3]),
        request_index=int32([0, 1]),
        block_tables=torch.tensor([[7, 3, 0], [9, 2, 5]], dtype=torch.int32),
        selected=int32([0, 1]),
    )


def listed(batch: Batch) -> list[list[int]]:
    pages = pages_of(batch, block_size=4)
    arrays = (pages.qo_indptr, pages.kv_indptr, pages.kv_indices, pages.last_page_len)
    assert all(array.dtype == torch.int32 for array in arrays)
    return [array.tolist() for array in arrays]


def test_the_pages_of_chunks_end_with_the_last_token_that_is_computed() -> None:
    unused = int32([0] * 5)
    batch = Batch(
        token_ids=unused,
        positions=int32([4, 0, 1, 2, 7]),
        slot_mapping=unused,
        request_index=int32([0, 1, 1, 1, 2]),
        block_tables=torch.tensor([[7, 3], [9, 0], [4, 1]], dtype=torch.int32),
        selected=unused,
    )
    assert listed(batch) == [[0, 1, 4, 5], [0, 2, 3, 5], [7, 3, 9, 4, 1], [1, 3, 4]]
    assert not pages_of(batch, 4).is_decode


def test_the_pages_of_decodes_have_a_row_each() -> None:
    assert listed(decode_batch()) == [[0, 1, 2], [0, 2, 5], [7, 3, 9, 2, 5], [1, 4]]
    assert pages_of(decode_batch(), 4).is_decode


def test_requests_without_rows_have_no_pages() -> None:
    batch = Batch(
        token_ids=int32([1]),
        positions=int32([3]),
        slot_mapping=int32([39]),
        request_index=int32([1]),
        block_tables=torch.tensor([[7, 3], [9, 0]], dtype=torch.int32),
        selected=int32([0]),
    )
    assert listed(batch) == [[0, 1], [0, 1], [9], [4]]


def test_padding_rows_read_and_write_the_scratch_block_alone() -> None:
    batch = padded(decode_batch(), 4, block_size=4)
    assert batch.token_ids.tolist() == [50, 60, 0, 0]
    assert batch.positions.tolist() == [4, 11, 0, 0]
    assert batch.slot_mapping.tolist() == [12, 23, 0, 0]
    assert batch.request_index.tolist() == batch.selected.tolist() == [0, 1, 2, 3]
    assert listed(batch) == [
        [0, 1, 2, 3, 4],
        [0, 2, 5, 6, 7],
        [7, 3, 9, 2, 5, 0, 0],
        [1, 4, 1, 1],
    ]


@pytest.mark.parametrize(
    ("num_graphs", "largest", "sizes"),
    [
        (8, 64, (1, 2, 4, 8, 16, 32, 64)),
        (3, 64, (16, 32, 64)),
        (8, 6, (1, 2, 3, 6)),
        (1, 9, (9,)),
        (0, 64, ()),
    ],
)
def test_graphs_are_of_the_largest_batch_and_of_its_halves(
    num_graphs: int, largest: int, sizes: tuple[int, ...]
) -> None:
    assert graph_sizes(num_graphs, largest) == sizes


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "reason"),
    [
        (torch.bfloat16, None, 64, None),
        (torch.float16, None, 128, None),
        (torch.float32, None, 64, "it computes in bf16 and fp16 alone"),
        (torch.bfloat16, torch.int8, 64, "keys and values have the dtype of the weights there"),
        (torch.bfloat16, None, 80, "heads of 80 are none of 64, 128, 256"),
    ],
)
def test_it_is_known_what_the_kernels_serve(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int, reason: str | None
) -> None:
    shape = ModelShape(2, 4, 2, head_dim, 64, 320, 512, (2,), dtype, kv_dtype)
    assert why_unsupported(shape) == reason


# Models


def load(directory: Path, recorder: Recorder | None = None) -> tuple[TorchDecoder, GraphedDecoder]:
    """The reference, and a decoder on the stand-in with graphs of 1, 2 and 4 rows."""
    config = read_config(directory)
    shape = config.shape(torch.bfloat16)
    attention = FlashInferAttention(shape, config.windows)
    with Checkpoint(directory, config, torch.bfloat16) as checkpoint:
        reference = TorchDecoder(config, checkpoint, shape, lambda layer: None)
        model = TorchDecoder(config, checkpoint, shape, lambda layer: None, attention=attention)
    capture = (recorder or Recorder()).capture
    return reference, GraphedDecoder(model, attention, (1, 2, 4), capture)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_chunks_and_decodes_have_the_logits_of_the_reference(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.install(monkeypatch)
    recorder = Recorder()
    models = load(make_tiny_model(family, tmp_path), recorder)
    drivers = [Driver(model, num_requests=3, max_tokens=64) for model in models]
    steps = [
        {0: PROMPTS[0][:20]},
        {0: PROMPTS[0][20:], 1: PROMPTS[1]},
        {0: [5], 1: [6], 2: PROMPTS[2]},
        {0: [7], 1: [8], 2: [9]},
        {0: [10], 1: [11], 2: [12]},
    ]
    for step in steps:
        expected, logits = (driver.step(step) for driver in drivers)
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert recorder.num_replays == 2


def decode(driver: Driver, requests: list[int]) -> Tensor:
    """A step of these requests alone: of others it knows nothing."""
    positions = int32([driver.computed[request] for request in requests])
    tables = driver.block_tables[requests]
    size = driver.block_size
    every = torch.arange(len(requests)).int()
    for request in requests:
        driver.computed[request] += 1
    batch = Batch(
        token_ids=int32([30 + request for request in requests]),
        positions=positions,
        slot_mapping=tables[every, positions // size] * size + positions % size,
        request_index=every,
        block_tables=tables,
        selected=every,
    )
    return driver.model.forward(batch, driver.cache)


def test_a_graph_serves_fewer_requests_others_and_another_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.install(monkeypatch)
    recorder = Recorder()
    models = load(make_tiny_model("llama", tmp_path), recorder)
    for _ in range(2):
        drivers = [Driver(model, num_requests=6, max_tokens=32) for model in models]
        for requests in ([1, 2, 3, 4], [4, 1, 2], [3], [2, 4], [1, 2, 3], [1, 2, 3, 4, 5]):
            expected, logits = (decode(driver, requests) for driver in drivers)
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert recorder.num_replays == 2 * 5


def test_a_batch_without_a_graph_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.install(monkeypatch)
    recorder = Recorder()
    reference, model = load(make_tiny_model("llama", tmp_path), recorder)
    drivers = [Driver(each, num_requests=5, max_tokens=32) for each in (reference, model)]
    logits = [driver.step({number: [40 + number] for number in range(5)}) for driver in drivers]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=1e-3)
    assert recorder.num_replays == 0


def test_updated_weights_have_graphs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_flashinfer.install(monkeypatch)
    recorder = Recorder()
    reference, model = load(make_tiny_model("llama", tmp_path), recorder)
    before = Driver(model, max_tokens=64).greedy(PROMPTS[0], 8)
    name = "model.layers.1.mlp.down_proj.weight"
    new = {name: torch.randn(reference.parameter_shapes[name]) * 0.1}
    greedy = [
        Driver(each.updated(new), max_tokens=64).greedy(PROMPTS[0], 8)
        for each in (reference, model)
    ]
    assert greedy[0] == greedy[1] != before
    assert Driver(model, max_tokens=64).greedy(PROMPTS[0], 8) == before


def test_on_a_gpu_products_are_of_the_weights_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Driver(load_reference(make_tiny_model("qwen3", tmp_path)), max_tokens=64)
    monkeypatch.setattr(ModelShape, "compute_dtype", property(lambda shape: shape.dtype))
    model = load_reference(tmp_path)
    assert {tensor.dtype for tensor in model.memory} == {torch.bfloat16}
    expected = reference.step({0: PROMPTS[0]})
    logits = Driver(model, max_tokens=64).step({0: PROMPTS[0]})
    assert logits.dtype == torch.float32
    assert logits.shape == (len(PROMPTS[0]), VOCAB_SIZE)
    error = (logits - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < 0.03


def load_reference(directory: Path) -> TorchDecoder:
    config = read_config(directory)
    shape = config.shape(torch.bfloat16)
    with Checkpoint(directory, config, torch.bfloat16) as checkpoint:
        return TorchDecoder(config, checkpoint, shape, lambda layer: None)
