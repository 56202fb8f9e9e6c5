"""The HTTP proxies in front of prefill and decode engines: one core, two flows (prefill first, decode first)."""
