"""Homing over the ranks of a torchrun job: one engine replica a rank.

torchrun --nnodes N --nproc-per-node M -m homing.launch MODEL

config.py      what a rank is told, by flags and by torchrun
rendezvous.py  how the ranks find each other, and learn of the end
serve.py       the life of one rank
"""
