"""Whether and how a request ends."""

from __future__ import annotations

import logging

from homing.engine.request import Request
from homing.errors import InvalidRequest
from homing.params.structured import invalid
from homing.wire import Finish, FinishReason

log = logging.getLogger(__name__)


def finished_before_start(request: Request) -> Finish | None:
    """The end of a request for which no token need be computed."""
    resumed = request.generated.tolist()
    if resumed and (word := request.stop_words and request.stop_words.push(resumed)):
        return Finish(FinishReason.STOP, stop=word)
    if not request.generates and not request.scores_prompt:
        return Finish(FinishReason.LENGTH)
    return None


def finish_after(request: Request, token: int) -> Finish | None:
    """Whether its newest token ends a request. An end of sequence at the limit is a stop."""
    if request.grammar:
        request.grammar.accept(token)
        if finish := finish_of_grammar(request):
            return finish
    if token in request.stop_token_ids:
        return Finish(FinishReason.STOP, stop=token)
    if request.stop_words and (word := request.stop_words.push([token])):
        return Finish(FinishReason.STOP, stop=word)
    if request.num_tokens == request.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None


def finish_of_grammar(request: Request) -> Finish | None:
    """Whether its grammar ends a request: nothing can follow, or no token could be chosen."""
    assert request.grammar is not None
    if request.grammar.error:
        return grammar_failure(invalid(request.grammar.error))
    if request.grammar.finished:
        return Finish(FinishReason.STOP, stop=int(request.tokens[-1]))
    return None


def grammar_failure(error: BaseException) -> Finish:
    if isinstance(error, InvalidRequest):
        return Finish(FinishReason.ERROR, detail=str(error), field=error.field or "")
    log.error("a grammar could not be compiled", exc_info=error)
    return Finish(FinishReason.ERROR, detail="the grammar could not be compiled")
