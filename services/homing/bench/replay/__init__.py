"""Replays request traces against simulated ranks: see `homing.bench.route`."""
