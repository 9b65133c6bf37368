"""The progress bar of a batch."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from homing.llm.results import Delta

MIN_PROMPTS = 8
"""A batch that is shorter shows no bar unless asked to."""


class BatchProgress:
    """Shows on stderr how many requests are done, and how fast tokens come."""

    def __init__(self, num_prompts: int, show: bool | None) -> None:
        """`show` None: for a long batch, where somebody can see it."""
        console = Console(stderr=True)
        if show is None:
            show = num_prompts >= MIN_PROMPTS and (console.is_terminal or console.is_jupyter)
        self._bar = _bar(console) if show else None
        self._num_prompts = num_prompts
        self._num_tokens = 0
        self._shown = ExitStack()

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            try:
                self._shown.enter_context(self._bar)
            except LiveError:  # another bar is on the screen
                self._bar = None
        if self._bar is not None:
            self._task = self._bar.add_task("generating", total=self._num_prompts, rate=0.0)
        return self

    def on_delta(self, delta: Delta) -> None:
        if self._bar is None:
            return
        self._num_tokens += len(delta.tokens)
        elapsed_s = self._bar.tasks[0].elapsed or 0.0
        self._bar.update(
            self._task,
            advance=1 if delta.result is not None else 0,
            rate=self._num_tokens / elapsed_s if elapsed_s else 0.0,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shown.__exit__(kind, error, trace)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
