"""Requests on the engine's side of the protocol: taken on once, answered, and ended once."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from homing.transport import Lender, loans
from homing.wire import Abort, Finish, FinishedRequest, FinishReason, Submit, pack
from tests.support.engine_session import ALICE, BOB, PROMPT, deltas, finished, joined, step, submit
from tests.support.fake_model import expected_greedy


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


def test_a_prompt_that_is_lent_is_read_where_it_lies(monkeypatch):
    monkeypatch.setattr(loans, "MIN_LOAN_BYTES", 1)
    session, engine = joined()
    sent = submit()
    loan = Lender().lend(bytes(sent.prompt or b""))
    assert loan is not None
    session.handle(msgspec.structs.replace(sent, prompt=None, lent_at=loan.place), 0.0)
    tokens = [delta.tokens for _ in range(3) for delta in deltas(step(session, engine))]
    assert array("I", b"".join(tokens)).tolist() == expected_greedy(PROMPT, 3)


def test_a_prompt_that_cannot_be_seen_is_asked_for():
    session, engine = joined()
    away = msgspec.structs.replace(submit(), prompt=None, lent_at=(2**31 - 2, 3, 4))
    [output] = session.handle(away, 0.0)
    [delta] = deltas([output])
    assert delta.finish is not None
    assert delta.finish.reason is FinishReason.UNREAD
    assert finished(output) == [FinishedRequest(1, 0, FinishReason.UNREAD, 0, 0)]
    assert not engine.has_work
    session.handle(submit(attempt=1), 0.0)
    assert {delta.attempt for delta in deltas(step(session, engine))} == {1}


def test_a_full_queue_is_answered_with_an_error():
    session, _ = joined(max_queued_requests=1)
    session.handle(submit(ALICE, 1), 0.0)
    [output] = session.handle(submit(ALICE, 2), 0.0)
    [delta] = deltas([output])
    assert delta.finish is not None
    assert "1 requests wait already" in delta.finish.detail


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
