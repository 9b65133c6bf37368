"""Attention over the paged KV cache: `reference` in torch; the CPU kernels are in
`homing.engine.kernels`."""
