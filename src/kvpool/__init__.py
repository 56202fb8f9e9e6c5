"""kvpool: a KV-cache pool for vLLM."""

__version__ = "0.1.0"
