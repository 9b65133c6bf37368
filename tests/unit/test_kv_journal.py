"""What an engine tells of its cache: stored and dropped prefixes, on tiny pools."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from homing.coordinator.kv_events import correct_guess
from homing.coordinator.loads import Slot
from homing.coordinator.router import RankRouter, RoutingConfig
from homing.engine import kv_journal
from homing.engine.engine import Engine
from homing.engine.kv_journal import KvJournal
from homing.params import SamplingParams
from homing.prefix import BlockHash, block_hashes, routing_points
from homing.wire import KvEvents, read_payload
from tests.support.fake_model import make_engine

BLOCK_SIZE = 4


def journaled(num_blocks: int = 64, **limits: int) -> tuple[Engine, KvJournal]:
    engine, _ = make_engine(num_blocks=num_blocks, block_size=BLOCK_SIZE, **limits)  # type: ignore[arg-type]
    engine.block_pool.journal = journal = KvJournal(BLOCK_SIZE)
    return engine, journal


def prompt(first: int, num_tokens: int) -> list[int]:
    """Prompts of another `first` share no prefix."""
    return [first, *(3 + n % 20 for n in range(num_tokens - 1))]


def run(engine: Engine, tokens: Sequence[int], num_new: int = 1, key: object = "r") -> list[int]:
    """Returns prompt and answer."""
    params = SamplingParams(num_tokens_to_generate=num_new, temperature=0.0, ignore_eos=True)
    engine.add_request(key, np.array(tokens), params)
    answer: list[int] = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            answer += output.token_ids
    return [*tokens, *answer]


def hashes_of(tokens: Sequence[int]) -> list[BlockHash]:
    return block_hashes(np.array(tokens, "<u4").tobytes(), BLOCK_SIZE)


def stored(events: KvEvents | None) -> list[list[bytes]]:
    """Of each sequence, the digests."""
    assert events is not None
    chains = read_payload(events.stored, list[bytes]) if events.stored is not None else []
    assert events.num_stored == len(chains)
    return [split(chain) for chain in chains]


def dropped(events: KvEvents | None) -> list[bytes]:
    assert events is not None
    digests = split(bytes(events.dropped or b""))
    assert events.num_dropped == len(digests)
    return digests


def split(joined: bytes) -> list[bytes]:
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]


def test_a_computed_prompt_and_its_answer_are_told_once():
    engine, journal = journaled()
    tokens = run(engine, prompt(1, 10), num_new=11)
    events = journal.take()
    assert stored(events) == [hashes_of(tokens)]
    assert len(hashes_of(tokens)) == 5, "two blocks of the prompt, three with the answer"
    assert dropped(events) == []
    assert journal.take() is None


def test_what_is_in_the_cache_already_is_not_told_again():
    engine, journal = journaled()
    tokens = run(engine, prompt(1, 12))
    journal.take()
    run(engine, tokens)
    assert journal.take() is None


def test_beyond_the_sixteenth_block_only_routing_points_are_told():
    engine, journal = journaled(max_context_tokens=256)
    tokens = run(engine, prompt(1, 4 * 35 + 1))
    hashes = hashes_of(tokens)
    assert stored(journal.take()) == [[hashes[depth - 1] for depth in routing_points(35)]]


def test_an_eviction_is_told_the_deepest_block_first():
    engine, journal = journaled(num_blocks=6)
    first = hashes_of(run(engine, prompt(1, 12)))
    assert stored(journal.take()) == [first]
    second = hashes_of(run(engine, prompt(2, 20)))
    events = journal.take()
    assert stored(events) == [second]
    assert dropped(events) == [*reversed(first)]


def test_only_blocks_that_the_coordinator_may_know_of_are_told_as_dropped():
    engine, journal = journaled(num_blocks=40, max_context_tokens=256)
    first = hashes_of(run(engine, prompt(1, 4 * 35 + 1)))
    journal.take()
    run(engine, prompt(2, 4 * 39 - 1))
    points = [first[depth - 1] for depth in routing_points(35)]
    assert dropped(journal.take()) == [*reversed(points)]


def test_a_prompt_that_ends_inside_a_longer_one_is_known_by_its_last_block():
    """That block is no routing point of the longer one, but the coordinator heard of it."""
    engine, journal = journaled(num_blocks=60, max_context_tokens=256)
    long = run(engine, prompt(1, 4 * 40))
    run(engine, long[: 4 * 35 + 1], key="short")
    journal.take()
    run(engine, prompt(2, 4 * 55))
    assert hashes_of(long)[34] in dropped(journal.take())


def test_a_prompt_that_was_never_computed_is_told_as_dropped():
    engine, journal = journaled(max_step_tokens=8)
    tokens = prompt(1, 21)
    engine.add_request("r", np.array(tokens), SamplingParams())
    engine.step()
    engine.abort("r")
    engine.step()
    events = journal.take()
    assert stored(events) == [hashes_of(tokens)[:2]]
    assert dropped(events) == [*reversed(hashes_of(tokens)[2:])]


def test_a_cleared_cache_is_told_as_dropped_and_nothing_of_it_as_stored():
    engine, journal = journaled()
    hashes = hashes_of(run(engine, prompt(1, 12)))
    engine.scheduler.clear_prefix_cache()
    events = journal.take()
    assert stored(events) == []
    assert sorted(dropped(events)) == sorted(hashes)


def test_what_was_dropped_and_is_there_again_is_not_told_as_dropped():
    engine, journal = journaled(num_blocks=6)
    run(engine, prompt(1, 16))
    run(engine, prompt(2, 16))
    hashes = hashes_of(run(engine, prompt(1, 16)))
    assert not {*hashes} & {*dropped(journal.take())}


def test_a_new_session_tells_nothing_of_the_one_before():
    engine, journal = journaled(num_blocks=6)
    run(engine, prompt(1, 12))
    run(engine, prompt(2, 16))
    journal.forget()
    assert journal.take() is None


def test_a_message_is_bounded_and_what_is_more_waits_for_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_journal, "MAX_DIGESTS", 7)
    engine, journal = journaled()
    chains = [hashes_of(run(engine, prompt(n, 12), key=n)) for n in range(5)]
    assert [stored(journal.take()) for _ in range(3)] == [chains[:2], chains[2:4], chains[4:]]
    engine.scheduler.clear_prefix_cache()
    assert [len(dropped(journal.take())) for _ in range(3)] == [7, 7, 1]


def test_what_waits_to_be_told_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_journal, "MAX_WAITING_DIGESTS", 4)
    monkeypatch.setattr(kv_journal, "MAX_WAITING_REQUESTS", 2)
    engine, journal = journaled()
    chains = [hashes_of(run(engine, prompt(n, 12), key=n)) for n in range(5)]
    assert stored(journal.take()) == chains[3:]
    engine.scheduler.clear_prefix_cache()
    assert len(dropped(journal.take())) == 4


def test_the_coordinator_s_guess_becomes_what_the_engine_holds():
    """Random prompts that meet and part, several at a time, some aborted, in a pool that evicts all
    the time; events that cross submissions. When all is told, the index is right."""
    source = random.Random(3)
    engine, journal = journaled(num_blocks=24, max_step_tokens=16)
    router, slot = router_of_one_rank()
    seen: list[list[int]] = []
    num_wrong_guesses = 0

    def hear() -> None:
        while events := journal.take():
            correct_guess(router, slot, events)

    for number in range(600):
        blocks = [source.choice((3, 3, 4)) for _ in range(source.randint(1, 15))]
        seen.append([token for token in blocks for _ in range(BLOCK_SIZE)] + [5])
        route(router, seen[-1])
        if source.random() < 0.3:
            hear()  # before the engine has the request
        engine.add_request(number, np.array(seen[-1]), SamplingParams(num_tokens_to_generate=9))
        for _ in range(source.randint(0, 6)):
            engine.step()
        if source.random() < 0.2:
            engine.abort(number)
        if source.random() < 0.3:
            hear()
        if number % 4 == 0:
            while engine.has_unfinished_requests:
                engine.step()
            num_wrong_guesses += wrong_guesses(router, slot, engine, seen[-40:])
            hear()
            assert wrong_guesses(router, slot, engine, seen[-40:]) == 0
            engine.scheduler.check()
    assert num_wrong_guesses > 100, "or the test shows nothing"
    assert engine.scheduler.num_preemptions > 10


def router_of_one_rank() -> tuple[RankRouter, Slot]:
    config = RoutingConfig(
        policy="prefix_affinity",
        alpha=0.5,
        load_unit="requests",
        prefix_ttl_s=1e6,
        max_index_entries=10**6,
        max_requests=10**6,
    )
    router = RankRouter(config, now=0.0)
    slot = router.open_slot()
    router.open(slot)
    return router, slot


def points_of(tokens: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
    hashes = hashes_of(tokens)
    depths = routing_points(len(hashes))
    return b"".join(hashes[depth - 1] for depth in depths), depths


def route(router: RankRouter, tokens: Sequence[int]) -> None:
    router.route(points_of(tokens)[0], len(tokens), BLOCK_SIZE, 0.0)


def wrong_guesses(
    router: RankRouter, slot: Slot, engine: Engine, prompts: Sequence[Sequence[int]]
) -> int:
    """Of how many prompts the index believes in more or fewer blocks than there are."""
    wrong = 0
    for tokens in prompts:
        digests, depths = points_of(tokens)
        [match] = router.index.match(digests, depths, 1 << slot)
        held = len(engine.block_pool.match(hashes_of(tokens)))
        wrong += match.num_blocks != max((depth for depth in depths if depth <= held), default=0)
    return wrong
