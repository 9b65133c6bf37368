"""What a step brought, as the wire has it."""

from __future__ import annotations

from typing import NamedTuple

from homing.engine.engine import RequestOutput
from homing.engine.log_probs import LogProbs
from homing.wire import (
    Delta,
    FinishedRequest,
    Output,
    PromptLogProbs,
    TopLogProbs,
    pack_payload,
    pack_tokens,
)


class Attempt(NamedTuple):
    """What the engine's requests are called here."""

    client: int
    request_id: int
    attempt: int


def output_message(client: int, deltas: list[Delta], finished: list[FinishedRequest]) -> Output:
    return Output(
        client,
        len(deltas),
        len(finished),
        pack_payload(finished) if finished else None,
        pack_payload(deltas),
    )


def delta_of(key: Attempt, output: RequestOutput) -> Delta:
    scores = output.log_probs
    prompt = output.prompt_log_probs
    return Delta(
        key.request_id,
        key.attempt,
        pack_tokens(output.token_ids),
        None if scores is None else scores.chosen.tobytes(),
        None if scores is None else _top(scores),
        (output.request.num_cached_at_start or 0) if output.is_first else None,
        None if prompt is None else PromptLogProbs(prompt.chosen.tobytes(), _top(prompt)),
        output.epoch,
        output.finish,
    )


def _top(scores: LogProbs) -> TopLogProbs | None:
    if not scores.num_top:
        return None
    return TopLogProbs(scores.num_top, scores.top_ids.tobytes(), scores.top.tobytes())


def finished_of(key: Attempt, output: RequestOutput) -> FinishedRequest:
    assert output.finish is not None
    return FinishedRequest(
        key.request_id,
        key.attempt,
        output.finish.reason,
        output.request.num_cached_at_start or 0,
        output.request.num_generated_here,
    )
