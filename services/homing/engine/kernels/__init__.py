"""The decoder in C for CPUs: `build` compiles `csrc/` on this machine, `decoder` calls it."""
