"""One request's answer as it grows: parts in, deltas out, a result at the end."""

from __future__ import annotations

import time

from homing.client import Part
from homing.errors import HomingError
from homing.llm.params import SamplingParams
from homing.llm.prompts import Prompt
from homing.llm.results import Alternatives, Delta, Result, Status
from homing.llm.text import TextCodec
from homing.params import SamplingParams as EngineParams
from homing.tokenizer import StopMatcher
from homing.wire import Finish, FinishReason


class Answer:
    def __init__(
        self,
        request_id: int,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        for_engine: EngineParams,
        codec: TextCodec,
    ) -> None:
        """Its clock starts now. `for_engine`: what an engine is told of `params`."""
        assert for_engine.seed is not None
        self._seed = for_engine.seed
        self._request_id = request_id
        self._index = index
        self._prompt = prompt
        self._params = params
        self._started = time.monotonic()
        self._first_token_s: float | None = None
        self._decoder = codec.decoder(prompt.token_ids) if params.detokenize_generations else None
        self._matcher = StopMatcher(params.stop_words, include=params.detokenize_stop_sequence)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._epochs: list[int] = []
        self._log_probs: list[float] = []
        self._top: list[Alternatives] = []
        self._prompt_log_probs: list[float | None] | None = None
        self._prompt_top: list[Alternatives | None] | None = None
        self._num_cached = 0
        self._num_text_parts_shown = 0
        self._num_tokens_shown = 0
        if prompt.resumed is not None:
            self._resume(prompt.resumed)

    def _resume(self, earlier: Result) -> None:
        """Begin with what was generated and shown before."""
        self._tokens += earlier.generated_tokens
        self._epochs += earlier.token_epochs
        self._log_probs += earlier.generated_log_probs or []
        self._top += earlier.generated_top_n_logprobs or []
        self._prompt_log_probs = earlier.prompt_log_probs
        self._prompt_top = earlier.prompt_top_n_logprobs
        self._show(Part(earlier.generated_tokens))
        self._num_text_parts_shown = len(self._text)
        self._num_tokens_shown = len(self._tokens)

    def push(self, part: Part) -> Delta | None:
        """What is new, once it is as much as a delta should be; always at the end."""
        if part.token_ids and self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._started
        self._tokens += part.token_ids
        self._epochs += [part.epoch] * len(part.token_ids)
        self._log_probs += part.log_probs or []
        self._top += part.top or []
        self._num_cached = part.num_cached_tokens or self._num_cached
        if part.prompt_log_probs is not None:
            self._prompt_log_probs = part.prompt_log_probs
            self._prompt_top = None if part.prompt_top is None else list(part.prompt_top)
        self._show(part)
        if part.finish is not None:
            return self._delta(part.finish)
        if len(self._tokens) - self._num_tokens_shown >= self._params.streaming_interval:
            return self._delta(None)
        return None

    def fail(self, error: HomingError) -> Delta:
        """The end of a request that `error` ended."""
        return self._delta(Finish(FinishReason.ERROR), error)

    def _show(self, part: Part) -> None:
        if self._decoder is None:
            return
        shown = part.token_ids
        if part.finish is not None and self._ended_by_id(part.finish):
            shown = shown[:-1]
        self._text.append(self._matcher.push(self._decoder.push(shown))[0])
        if part.finish is not None:
            self._text.append(self._matcher.push(self._decoder.finish())[0])
            self._text.append(self._matcher.finish())

    def _ended_by_id(self, finish: Finish) -> bool:
        """Whether the last token only ended the answer, and is no part of its text."""
        return (
            isinstance(finish.stop, int)
            and not self._params.detokenize_stop_sequence
            and self._tokens[-1:] == [finish.stop]
        )

    def _delta(self, finish: Finish | None, error: HomingError | None = None) -> Delta:
        start, self._num_tokens_shown = self._num_tokens_shown, len(self._tokens)
        text_start, self._num_text_parts_shown = self._num_text_parts_shown, len(self._text)
        return Delta(
            request_id=self._request_id,
            index=self._index,
            text="".join(self._text[text_start:]),
            tokens=self._tokens[start:],
            log_probs=self._log_probs[start:] if self._params.return_log_probs else None,
            top_n_logprobs=self._top[start:] if self._params.top_n_logprobs else None,
            finish_reason=finish.reason.value if finish else None,
            result=self._result(finish, error) if finish else None,
        )

    def _result(self, finish: Finish, error: HomingError | None) -> Result:
        params = self._params
        return Result(
            request_id=self._request_id,
            prompt=self._prompt.text,
            num_prompt_tokens=len(self._prompt.token_ids),
            prompt_tokens=list(self._prompt.token_ids) if params.return_prompt_tokens else None,
            generated_text=None if self._decoder is None else "".join(self._text),
            generated_tokens=self._tokens,
            prompt_log_probs=self._prompt_log_probs,
            generated_log_probs=self._log_probs if params.return_log_probs else None,
            prompt_top_n_logprobs=self._prompt_top,
            generated_top_n_logprobs=self._top if params.top_n_logprobs else None,
            finish_reason=finish.reason.value,
            stop_reason=finish.stop,
            num_cached_tokens=self._num_cached,
            seed=self._seed,
            token_epochs=self._epochs,
            ttft=self._first_token_s,
            latency=time.monotonic() - self._started,
            status=_STATUS_OF.get(finish.reason, Status.COMPLETED),
            error=error,
        )


_STATUS_OF = {FinishReason.ABORT: Status.ABORTED, FinishReason.ERROR: Status.FAILED}
