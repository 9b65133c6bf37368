"""Benchmarks. Each prints one JSON object with a list `results`.

    serve.py         any OpenAI server, over HTTP: TTFT, ITL, tokens/s, cached tokens
    coordinator.py   the coordinator process alone: CPU a request and an Output
    frontend.py      one frontend process, beside a bare Quart app: CPU and added time
    agreement.py     log-probabilities of the engine against those of a training model
    precision.py     formats of weights and KV cache: speed, memory, distance from fp32
    weights.py       updates of a model's weights, beside a plain memcpy
    soak.py          random traffic on a small cache: right answers, no leak
    suspend.py       the memory of an engine process while it is suspended
    route.py         the routing policies, by replaying request traces

`homing bench NAME` calls `homing.bench.NAME:main(argv)`.
"""
