"""The disk tier of the embedded store: what leaves memory stays on an SSD, over restarts and reboots.

The tier is a second pool with the same books (index, slabs, leases, LRU: ``DiskPool``), whose arena is a file on the disk. The
books lie in memory beside those of the first pool; what they hold is said once more on the disk itself, in one record per object,
from which they are made anew when they are gone. Only one process at a time, the elected demoter, writes to the disk; all read."""
