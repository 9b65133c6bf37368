"""Structured output: answers that fit a JSON schema, a pattern, a list of choices or a grammar.

    compiler     a definition -> a compiled grammar, off the engine's loop, each once
    screening    a process of its own that tries a stranger's definition first, and may die of it
    grammar      a compiled grammar; where one answer is in it, and which tokens may follow
    vocabulary   the bytes of every token, as the grammar library wants them

The library is llguidance; nothing outside this package knows it.
"""
