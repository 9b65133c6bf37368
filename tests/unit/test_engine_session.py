"""The engine's side of the protocol, driven by literal messages and a clock of numbers."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from msgspec.structs import replace

from homing.engine.engine import Engine
from homing.engine.kv_journal import KvJournal
from homing.engine.session import SILENCE_S, EngineSession
from homing.errors import ConfigError, Unavailable
from homing.params import SamplingParams
from homing.wire import (
    PROTOCOL_VERSION,
    Abort,
    Command,
    Control,
    ControlDone,
    Delta,
    Drain,
    Finish,
    FinishedRequest,
    FinishReason,
    FleetState,
    Heartbeat,
    Hello,
    KvEvents,
    Message,
    ModelCard,
    Output,
    Refused,
    Rejoin,
    Role,
    Submit,
    Welcome,
    pack,
    read_payload,
)
from tests.support.fake_model import expected_greedy, make_engine

CARD = ModelCard(
    name="fake",
    tokenizer_dir="",
    max_context_tokens=128,
    vocab_size=32,
    eos_token_ids=(2,),
    block_size=4,
)
PROMPT = [5, 6, 7, 8, 9]
ALICE, BOB = 100, 200


def make_session(**limits: int) -> tuple[EngineSession, Engine]:
    engine, _ = make_engine(**limits)  # type: ignore[arg-type]
    session = EngineSession(engine, CARD, uid=7, rank=3, join_timeout_s=60.0)
    session.start(0.0)
    return session, engine


def joined(**limits: int) -> tuple[EngineSession, Engine]:
    session, engine = make_session(**limits)
    session.handle(welcome(), 0.0)
    return session, engine


def welcome() -> Welcome:
    return Welcome(
        protocol_version=PROTOCOL_VERSION,
        incarnation=1,
        rank=3,
        state=FleetState.RUNNING,
        epoch=0,
        control_sequence=0,
        policy="round_robin",
        reads_prefixes=False,
        live_ranks=1,
        heartbeat_s=0.5,
    )


def submit(
    client: int = ALICE,
    request_id: int = 1,
    *,
    attempt: int = 0,
    prompt: list[int] | None = None,
    resumed: int = 0,
    max_new_tokens: int = 3,
    **params: object,
) -> Submit:
    tokens = PROMPT if prompt is None else prompt
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})  # type: ignore[arg-type]
    return Submit(
        client,
        request_id,
        attempt,
        len(tokens),
        resumed,
        max_new_tokens,
        prompt=array("I", tokens).tobytes(),
        sampling=sampling.to_bytes(),
    )


def step(session: EngineSession, engine: Engine) -> list[Output]:
    messages = session.outputs(engine.step())
    for message in messages:
        pack(message)
    return [message for message in messages if isinstance(message, Output)]


def deltas(outputs: list[Message] | list[Output]) -> list[Delta]:
    found: list[Delta] = []
    for output in outputs:
        assert isinstance(output, Output)
        part = read_payload(output.deltas or b"", list[Delta])
        assert len(part) == output.num_deltas
        found += part
    return found


def finished(output: Message) -> list[FinishedRequest]:
    assert isinstance(output, Output)
    return read_payload(output.finished or b"\x90", list[FinishedRequest])


def kinds(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]


# Joining


def test_a_hello_says_who_the_engine_is():
    engine, _ = make_engine()
    session = EngineSession(engine, CARD, uid=7, rank=3, join_timeout_s=60.0)
    [hello] = session.start(0.0)
    assert isinstance(hello, Hello)
    assert (hello.role, hello.uid, hello.rank, hello.incarnation) == (Role.ENGINE, 7, 3, 0)
    assert read_payload(hello.model_card or b"", ModelCard) == CARD


def test_hello_is_repeated_less_and_less_often_until_the_coordinator_answers():
    session, _ = make_session()
    times = [now / 2 for now in range(40) if session.tick(now / 2)]
    assert times == [1.0, 3.0, 7.0, 15.0]


def test_an_engine_that_nobody_answers_gives_up():
    session, _ = make_session()
    session.tick(60.0)
    with pytest.raises(Unavailable, match="no coordinator answered in 75 s"):
        session.tick(75.0)


def test_a_welcome_starts_heartbeats():
    session, _ = make_session()
    assert kinds(session.handle(welcome(), 1.0)) == [Heartbeat]
    assert session.tick(1.4) == []
    assert kinds(session.tick(1.5)) == [Heartbeat]
    assert session.next_tick == 2.0


def test_a_refusal_is_a_config_error():
    session, _ = make_session()
    with pytest.raises(ConfigError, match="refuses this engine: rank 3 is taken"):
        session.handle(Refused("rank 3 is taken"), 0.0)


def test_a_submission_before_the_welcome_is_ignored():
    session, engine = make_session()
    assert session.handle(submit(), 0.0) == []
    assert not engine.has_work


# Sessions that end


def test_rejoin_drops_all_work_and_says_hello_again():
    session, engine = joined()
    session.handle(submit(), 0.0)
    step(session, engine)
    [hello] = session.handle(Rejoin(9), 1.0)
    assert isinstance(hello, Hello)
    assert (hello.uid, hello.incarnation) == (7, 1)
    assert step(session, engine) == []
    assert engine.block_pool.num_held == 0
    assert not engine.has_work


def test_a_burst_of_rejoins_begins_one_session():
    session, _ = joined()
    assert len(session.handle(Rejoin(9), 1.0)) == 1
    assert session.handle(Rejoin(9), 1.0) == []
    assert session.incarnation == 1


def test_after_a_silence_the_engine_drops_its_work_and_goes_on_saying_hello():
    session, engine = joined()
    session.handle(submit(), 0.0)
    assert kinds(session.tick(SILENCE_S - 1)) == [Heartbeat]
    [hello] = session.tick(SILENCE_S + 1)
    assert isinstance(hello, Hello)
    assert hello.incarnation == 1
    assert not engine.has_unfinished_requests
    [again] = session.tick(SILENCE_S + 2)
    assert isinstance(again, Hello)
    assert again.incarnation == 1


# Leaving


def test_an_engine_that_leaves_says_so_finishes_and_may_go():
    session, engine = joined()
    session.handle(submit(), 1.0)
    assert not session.may_go(2.0)
    assert session.leave(2.0, 30.0) == [Drain(0, None, 30.0)]
    session.handle(Drain(0, None, 30.0), 2.1)
    while engine.has_unfinished_requests:
        assert not session.may_go(3.0)
        step(session, engine)
    assert session.may_go(3.0)


def test_an_engine_that_leaves_goes_when_its_time_is_up():
    session, _ = joined()
    session.handle(submit(), 1.0)
    session.handle(Drain(0, None, 5.0), 2.0)
    assert not session.may_go(6.9)
    assert session.may_go(7.0)


def test_the_shorter_of_two_times_to_leave_counts():
    session, _ = joined()
    session.handle(submit(), 1.0)
    session.leave(2.0, 30.0)
    session.handle(Drain(0, None, 1.0), 2.0)
    session.handle(Drain(0, None, 60.0), 2.5)
    assert session.may_go(3.0)


def test_an_engine_that_nobody_answers_may_leave_at_once():
    session, _ = make_session()
    assert session.leave(1.0, 30.0) == []
    assert session.may_go(1.0)


def test_an_engine_that_rejoins_while_it_leaves_says_so_again():
    session, _ = joined()
    session.leave(2.0, 30.0)
    session.handle(Rejoin(9), 3.0)
    assert session.handle(welcome(), 4.0)[-1] == Drain(0, None, 28.0)


def test_a_priority_and_a_deadline_reach_the_engine():
    session, engine = joined(max_batch_requests=1)
    session.handle(submit(request_id=1, max_new_tokens=50), 1.0)
    step(session, engine)
    urgent = msgspec.structs.replace(submit(request_id=2), priority=-1, deadline_s=2.0)
    session.handle(urgent, 1.0)
    assert [delta.request_id for delta in deltas(step(session, engine))] == [2]
    engine.expire(3.0)
    [late] = [d for d in deltas(session.outputs(engine.step())) if d.request_id == 2]
    assert late.finish == Finish(FinishReason.ABORT, detail="its deadline passed")


def test_a_lost_connection_ends_the_session_once():
    session, engine = joined()
    session.handle(submit(), 1.0)
    [hello] = session.lost_connection(2.0)
    assert isinstance(hello, Hello)
    assert hello.incarnation == 1
    assert not engine.has_unfinished_requests
    assert session.lost_connection(2.1) == []


def test_a_coordinator_that_shows_itself_is_not_silent():
    session, _ = joined()
    for now in range(1, 60):
        session.handle(Heartbeat(1), float(now))
        assert kinds(session.tick(now + 0.5)) == [Heartbeat]


# Requests


def test_a_request_is_answered_token_by_token_and_ends_once():
    session, engine = joined()
    assert session.handle(submit(), 0.0) == []
    outputs = [step(session, engine) for _ in range(3)]
    parts = [deltas(output)[0] for output in outputs]
    tokens = [array("I", part.tokens).tolist() for part in parts]
    assert tokens == [[token] for token in expected_greedy(PROMPT, 3)]
    assert [part.num_cached_tokens for part in parts] == [0, None, None]
    assert [part.finish and part.finish.reason for part in parts] == [
        None,
        None,
        FinishReason.LENGTH,
    ]
    assert finished(outputs[2][0]) == [FinishedRequest(1, 0, FinishReason.LENGTH, 0, 3)]
    assert step(session, engine) == []


def test_an_answer_carries_nothing_of_its_prompt():
    def num_bytes(prompt: list[int]) -> int:
        session, engine = joined()
        session.handle(submit(prompt=prompt), 0.0)
        outputs = [output for _ in range(12) for output in step(session, engine)]
        assert [end for output in outputs for end in finished(output)]
        return sum(memoryview(frame).nbytes for output in outputs for frame in pack(output))

    few, many = [5, 6, 7, 8], [5, 6, 7, 8] * 28
    assert abs(num_bytes(many) - num_bytes(few)) < 20


def test_a_step_sends_one_message_to_each_client():
    session, engine = joined()
    for client, request_id in ((ALICE, 1), (BOB, 1), (ALICE, 2), (BOB, 2)):
        prompt = [*PROMPT, client % 7 + 3, request_id + 3]
        session.handle(submit(client, request_id, prompt=prompt), 0.0)
    step(session, engine)
    outputs = step(session, engine)
    assert [(output.client, output.num_deltas) for output in outputs] == [(ALICE, 2), (BOB, 2)]
    assert [delta.request_id for delta in deltas(outputs[:1])] == [1, 2]


def test_the_same_attempt_submitted_twice_runs_once():
    session, engine = joined()
    session.handle(submit(), 0.0)
    session.handle(submit(), 0.0)
    assert len(deltas(step(session, engine))) == 1


def test_a_higher_attempt_replaces_a_lower_one_silently():
    session, engine = joined()
    session.handle(submit(attempt=0), 0.0)
    step(session, engine)
    session.handle(submit(attempt=1), 0.0)
    assert {delta.attempt for delta in deltas(step(session, engine))} == {1}
    session.handle(submit(attempt=0), 0.0)
    assert {delta.attempt for delta in deltas(step(session, engine))} == {1}


def test_requests_of_the_same_number_from_two_clients_are_two_requests():
    session, engine = joined()
    session.handle(submit(ALICE, 1), 0.0)
    session.handle(submit(BOB, 1, prompt=[3, 4]), 0.0)
    step(session, engine)
    outputs = step(session, engine)
    assert [output.client for output in outputs] == [ALICE, BOB]


def test_a_resumed_request_counts_what_it_generates_here():
    session, engine = joined()
    tokens = expected_greedy(PROMPT, 3)
    session.handle(submit(attempt=1, prompt=PROMPT + tokens[:2], resumed=2, max_new_tokens=1), 0.0)
    [output] = step(session, engine)
    assert finished(output) == [FinishedRequest(1, 1, FinishReason.LENGTH, 0, 1)]
    assert array("I", deltas([output])[0].tokens).tolist() == tokens[2:]


@pytest.mark.parametrize(
    ("message", "detail", "field"),
    [
        (submit(prompt=[3] * 128), "maximum context length is 128", "prompt"),
        (submit(prompt=[]), "no tokens", "prompt"),
        (submit(prompt=[2**32 - 1]), "token id 4294967295 is not in the vocabulary", "prompt"),
        (submit(logit_bias={77: 1.0}), "token id 77 in logit_bias", "logit_bias"),
        (Submit(ALICE, 1, 0, 2, 0, 3, prompt=b"12345", sampling=b"\x80"), "uint32", "prompt"),
        (
            Submit(ALICE, 1, 0, 2, 0, 3, prompt=b"1234", sampling=b"\x80"),
            "2 were announced",
            "prompt",
        ),
        (Submit(ALICE, 1, 0, 1, 0, 3, prompt=b"\5\0\0\0", sampling=b"x"), "sampling", "sampling"),
        (Submit(ALICE, 1, 0, 1, 0, 3, prompt=b"\5\0\0\0"), "sampling", "sampling"),
        (Submit(ALICE, 1, 0, 0, 0, 3, sampling=b"\x80"), "no tokens", "prompt"),
    ],
)
def test_what_cannot_be_served_is_answered_with_an_error(message: Submit, detail: str, field: str):
    session, engine = joined()
    [output] = session.handle(message, 0.0)
    [delta] = deltas([output])
    assert delta.finish is not None
    assert delta.finish.reason is FinishReason.ERROR
    assert detail in delta.finish.detail
    assert delta.finish.field == field
    assert finished(output) == [FinishedRequest(1, 0, FinishReason.ERROR, 0, 0)]
    assert not engine.has_work
    session.handle(submit(), 0.0)
    assert len(deltas(step(session, engine))) == 1


def test_a_full_queue_is_answered_with_an_error():
    session, _ = joined(max_queued_requests=1)
    session.handle(submit(ALICE, 1), 0.0)
    [output] = session.handle(submit(ALICE, 2), 0.0)
    [delta] = deltas([output])
    assert delta.finish is not None
    assert "1 requests wait already" in delta.finish.detail


def test_an_abort_is_answered_by_the_last_output():
    session, engine = joined()
    session.handle(submit(max_new_tokens=50), 0.0)
    step(session, engine)
    step(session, engine)
    assert session.handle(Abort(ALICE, 1, 0), 0.0) == []
    [output] = step(session, engine)
    assert finished(output) == [FinishedRequest(1, 0, FinishReason.ABORT, 0, 2)]
    assert step(session, engine) == []


def test_aborts_of_other_attempts_and_of_what_has_ended_are_ignored():
    session, engine = joined()
    session.handle(submit(attempt=1), 0.0)
    session.handle(Abort(ALICE, 1, 0), 0.0)
    session.handle(Abort(BOB, 1, 1), 0.0)
    outputs = [step(session, engine) for _ in range(3)]
    assert finished(outputs[-1][0])[0].reason is FinishReason.LENGTH
    session.handle(Abort(ALICE, 1, 1), 0.0)
    assert step(session, engine) == []


def test_log_probs_travel_with_their_tokens():
    session, engine = joined()
    params = {"return_log_probs": True, "skip_prompt_log_probs": False, "top_n_logprobs": 2}
    session.handle(submit(**params), 0.0)
    first, second = (deltas(step(session, engine))[0] for _ in range(2))
    assert first.prompt is not None
    assert len(first.prompt.log_probs) == 4 * (len(PROMPT) - 1)
    assert first.prompt.top is not None
    assert len(first.prompt.top.token_ids) == 4 * 2 * (len(PROMPT) - 1)
    assert second.prompt is None
    for delta in (first, second):
        assert len(delta.log_probs or b"") == 4
        assert delta.top is not None
        assert (delta.top.n, len(delta.top.log_probs)) == (2, 8)


# Control


def test_pause_and_unpause_are_carried_out_and_answered():
    session, engine = joined()
    session.handle(submit(), 0.0)
    [paused] = session.handle(Control(Command.PAUSE, 4), 0.0)
    assert isinstance(paused, ControlDone)
    assert (paused.command, paused.sequence, paused.ok) == (Command.PAUSE, 4, True)
    assert step(session, engine) == []
    [again] = session.handle(Control(Command.PAUSE, 5), 0.0)
    assert isinstance(again, ControlDone)
    assert again.ok
    session.handle(Control(Command.UNPAUSE, 6), 0.0)
    assert len(deltas(step(session, engine))) == 1


def test_a_hello_tells_the_state_and_the_last_command():
    session, _ = joined()
    session.handle(Control(Command.PAUSE, 4), 0.0)
    [hello] = session.handle(Rejoin(9), 1.0)
    assert isinstance(hello, Hello)
    assert (hello.state, hello.control_sequence) == (FleetState.PAUSED, 4)


def test_a_reset_prefix_cache_tells_how_much_was_dropped():
    session, engine = joined()
    session.handle(submit(prompt=list(range(3, 20))), 0.0)
    step(session, engine)
    [done] = session.handle(Control(Command.RESET_PREFIX_CACHE, 1), 0.0)
    assert isinstance(done, ControlDone)
    assert read_payload(done.results or b"", dict[str, int]) == {
        "dropped_blocks": 4,
        "unfinished_requests": 1,
    }


def test_a_heartbeat_shows_the_engine():
    session, engine = joined(max_batch_requests=1)
    session.handle(submit(ALICE, 1), 0.0)
    session.handle(submit(ALICE, 2, prompt=[3, 4, 5]), 0.0)
    step(session, engine)
    [beat] = session.tick(0.5)
    assert isinstance(beat, Heartbeat)
    assert (beat.running, beat.waiting, beat.owed_tokens) == (1, 1, 4)
    assert (beat.kv_used_blocks, beat.kv_total_blocks) == (2, 63)
    counters = read_payload(beat.counters or b"", dict[str, float])
    assert counters["requests_started"] == 2
    assert counters["prefilled_tokens"] == 5
    pack(beat)


def test_what_the_cache_holds_is_told_after_a_heartbeat_to_a_fleet_that_reads_prefixes():
    session, engine = joined()
    engine.block_pool.journal = KvJournal(engine.limits.block_size)
    session.handle(submit(prompt=list(range(3, 20))), 0.0)
    step(session, engine)
    assert kinds(session.tick(0.5)) == [Heartbeat], "this fleet's policy reads none"
    session.handle(replace(welcome(), reads_prefixes=True), 0.6)
    beat, events = session.tick(1.1)
    assert isinstance(beat, Heartbeat)
    assert isinstance(events, KvEvents)
    assert (events.num_stored, events.num_dropped) == (1, 0)
    pack(events)
    assert kinds(session.tick(1.6)) == [Heartbeat]


def test_a_new_session_tells_nothing_of_the_one_before():
    session, engine = joined()
    engine.block_pool.journal = KvJournal(engine.limits.block_size)
    session.handle(submit(prompt=list(range(3, 20))), 0.0)
    step(session, engine)
    session.handle(Rejoin(9), 0.4)
    session.handle(replace(welcome(), reads_prefixes=True), 0.5)
    assert kinds(session.tick(1.0)) == [Heartbeat]
