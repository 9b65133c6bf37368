"""Random prompts of about a given number of tokens, for servers whose tokenizer we do not know.

A common English word after a space is one token in nearly every vocabulary: words are counted, and
the server's own count of a first prompt corrects the rest.
"""

from __future__ import annotations

import random

_WORDS = """
about above across after again against almost along already also always among animal another
answer around away back ball bank base bear became because become been before began behind being
below best better between bird black blue boat body book both bottom bring brother brought brown
build business call came cannot care carry cause center certain chance change check child children
choose city class clear close cold color come common complete contain control cook cool copy
correct cost could country course cover cross current dance dark daughter deep degree describe
design different direct distance doctor does done door double down draw dream dress drink drive
during each early earth east easy edge effect either electric else energy engine enough equal even
evening event ever every exact example except expect explain fact fair fall family famous farm
fast father favor feel feet fell field fight figure fill final find fine finger finish fire first
fish five floor flow flower follow food foot force foreign forest form forward found four free
fresh friend from front fruit full game garden gave general gentle girl give glass gold good grand
grass great green ground group grow guess half hand happen happy hard have head hear heart heat
heavy held help here high hill history hold hole home hope horse hospital hour house human hundred
idea important inch include increase indeed industry inside interest island issue join jump just
keep kept kind king kitchen knew knowledge known lady land language large last late laugh lead
learn least leave left length less letter level life light like line list listen little live local
long look lost loud love machine main make many mark market master material matter mean measure
meat meet member message metal method middle might mile milk million mind minute miss modern
moment money month moon more morning most mother mountain mouth move much music
"""
WORDS = _WORDS.split()


class PromptSource:
    """Prompts that begin with the same words and go on with fresh ones."""

    def __init__(self, *, num_words: int, num_shared_words: int, seed: int | None) -> None:
        """Without `seed` the prompts differ in each run, so that no server has them cached."""
        self._random = random.Random(seed)
        self._num_fresh_words = num_words - num_shared_words
        self._shared = self._words(num_shared_words)

    def next_prompt(self) -> str:
        return " ".join(self._shared + self._words(self._num_fresh_words))

    def _words(self, count: int) -> list[str]:
        return self._random.choices(WORDS, k=count)
