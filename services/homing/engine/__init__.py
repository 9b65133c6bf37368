"""One replica of the model: schedules requests, runs the model and answers token by token.

worker       the loop: receive, handle, schedule, run, send
session      its side of the protocol, without a socket
engine       requests in, tokens out, one step at a time
scheduler    which tokens run this step         block_pool   who holds which KV block
runner       a step's forward pass              sampling     logits -> tokens
"""
