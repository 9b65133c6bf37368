"""OpenAI's shapes: request bodies, what they mean to us, and reply bodies.

Knows nothing of HTTP, sockets or the fleet.
"""
