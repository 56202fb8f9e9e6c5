"""`kvpool doctor`: checks a host against what a deployment needs. Readers in ``facts``, pure rules in ``rules``.

Nothing is changed. What could harm (drop_caches, nr_hugepages, secverify) is printed as a fix, never run."""

from __future__ import annotations

from kvpool.ops.doctor.choosing import Asked
from kvpool.ops.doctor.examine import examine
from kvpool.ops.doctor.finding import Finding, Level
from kvpool.ops.doctor.host import Host

__all__ = ["Asked", "Finding", "Host", "Level", "examine"]
