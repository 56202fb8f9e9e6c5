"""The pure part: keys, layouts, hits, jobs. Standard library and numpy only: no torch, no vllm, no I/O."""
