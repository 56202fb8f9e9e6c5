/* A stand-in for the driver and the runtime of an Ascend NPU, for tests on hosts without one. "Device memory" is memory of the process. */
#ifndef KVPOOL_STAND_IN_H
#define KVPOOL_STAND_IN_H

#include <stddef.h>
#include <stdint.h>

/* With STAND_IN_TRACE set every call is written to stderr. Returns 0, the success of all these libraries. */
int stand_in_trace(const char *name, const void *pointer);

/* Memory of another process, seen at `base` here: copies from and into it go through process_vm_readv and process_vm_writev. */
int stand_in_map_peer(void *base, size_t nbytes, int pid, uint64_t address);
void stand_in_unmap_peer(const void *address, int free_range);

/* Copy between any two places, one of which may be a peer's. 0, or not 0 when it cannot be done. */
int stand_in_copy(void *to, const void *from, size_t nbytes);

#endif
