"""KV below the GPU: one layout for every topology, a CPU region per node, and tiers under it."""
