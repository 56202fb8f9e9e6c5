"""Readers: each reads one side of a host into a frozen dataclass. What cannot be read is None, and no reader raises."""
