/* The runtime (acl*, rt*): devices, streams, memory, copies, memory shared by name. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stand_in.h"

#define DONE(name) int name() { return stand_in_trace(#name, 0); }
#include "trivial.inc"

int g_devmm_mem_dev = 0; /* looked up as data */

/* devices: one, of a kind that STAND_IN_SOC may change */
const char *aclrtGetSocName(void)
{
    const char *chosen = getenv("STAND_IN_SOC");
    return chosen ? chosen : "Ascend910B1";
}
int aclrtGetVersion(int *major, int *minor, int *patch) { *major = 1; *minor = 0; *patch = 0; return 0; }
int aclrtSetDevice(int device) { (void)device; return 0; }
int aclrtGetDevice(int *device) { if (device) *device = 0; return 0; }
int aclrtGetPhyDevIdByLogicDevId(int logical, int *physical) { *physical = logical; return 0; }
int rtGetLogicDevIdByUserDevId(int user, int *logical) { *logical = user; return 0; }
int rtDeviceGetBareTgid(unsigned *pid) { *pid = (unsigned)getpid(); return 0; }
int rtGetDeviceInfo(unsigned device, int module, int kind, int64_t *value)
{
    (void)device; (void)module; (void)kind;
    *value = 0;
    return 0;
}
int rtGetP2PStatus(unsigned one, unsigned other, unsigned *status) { (void)one; (void)other; *status = 1; return 0; }
int aclrtGetCurrentContext(void **context) { static int any; *context = &any; return 0; }

/* streams: everything is done at once, so a stream is only an address */
int aclrtCreateStream(void **stream) { *stream = malloc(64); return 0; }
int aclrtCreateStreamWithConfig(void **stream, int priority, unsigned flags)
{
    (void)priority; (void)flags;
    return aclrtCreateStream(stream);
}
int aclrtDestroyStream(void *stream) { free(stream); return 0; }

/* memory */
int aclrtMalloc(void **pointer, size_t nbytes, unsigned policy) { (void)policy; return posix_memalign(pointer, 4096, nbytes) ? 1 : 0; }
int aclrtMallocHost(void **pointer, size_t nbytes) { return posix_memalign(pointer, 4096, nbytes) ? 1 : 0; }
int aclrtFree(void *pointer) { free(pointer); return 0; }
int aclrtFreeHost(void *pointer) { free(pointer); return 0; }
int aclrtMemset(void *pointer, size_t room, int value, size_t nbytes) { (void)room; memset(pointer, value, nbytes); return 0; }

/* copies */
int aclrtMemcpy(void *to, size_t room, const void *from, size_t nbytes, unsigned kind)
{
    (void)room; (void)kind;
    return stand_in_copy(to, from, nbytes);
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t nbytes, unsigned kind, void *stream)
{
    (void)stream;
    return aclrtMemcpy(to, room, from, nbytes, kind);
}
int rtMemcpyAsyncWithoutCheckKind(void *to, size_t room, const void *from, size_t nbytes, unsigned kind, void *stream)
{
    (void)stream;
    return aclrtMemcpy(to, room, from, nbytes, kind);
}
int aclrtMemcpy2d(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows, unsigned kind)
{
    (void)kind;
    for (size_t row = 0; row < rows; row++)
        if (stand_in_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width))
            return 1;
    return 0;
}
int aclrtMemcpy2dAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows, unsigned kind,
                       void *stream)
{
    (void)stream;
    return aclrtMemcpy2d(to, to_pitch, from, from_pitch, width, rows, kind);
}
int aclrtMemcpyBatch(void **to, size_t *rooms, void **from, size_t *nbytes, size_t count, void *attributes, size_t *indexes,
                     size_t attribute_count, size_t *failed)
{
    (void)rooms; (void)attributes; (void)indexes; (void)attribute_count;
    for (size_t i = 0; i < count; i++)
        if (stand_in_copy(to[i], from[i], nbytes[i])) {
            if (failed)
                *failed = i;
            return 1;
        }
    return 0;
}

/* Memory shared by name: the name says process, address and length, so that whoever opens it knows what to read. */
int rtIpcSetMemoryName(const void *pointer, uint64_t nbytes, char *name, unsigned room)
{
    snprintf(name, room, "%d:%llx:%llx", getpid(), (unsigned long long)(uintptr_t)pointer, (unsigned long long)nbytes);
    return 0;
}
int rtIpcOpenMemory(void **pointer, const char *name)
{
    int pid;
    unsigned long long address, nbytes;
    if (sscanf(name, "%d:%llx:%llx", &pid, &address, &nbytes) != 3)
        return 1;
    void *range = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED || stand_in_map_peer(range, nbytes, pid, address))
        return 1;
    *pointer = range;
    return stand_in_trace("rtIpcOpenMemory", range);
}
int rtIpcCloseMemory(const void *pointer) { stand_in_unmap_peer(pointer, 1); return 0; }
