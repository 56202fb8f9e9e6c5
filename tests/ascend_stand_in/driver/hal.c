/* The driver (hal*, drv*): address ranges, memory handles that other processes can import, and the queue of copy tasks. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stand_in.h"

#define PAGE (2UL << 20) /* large pages, which callers align to */

int drvMemGetAttribute(const void *pointer, unsigned *attributes)
{
    const char *chosen = getenv("STAND_IN_MEMTYPE");
    (void)pointer;
    attributes[0] = chosen ? (unsigned)strtoul(chosen, NULL, 0) : 4;
    attributes[1] = 0;
    attributes[2] = 4096;
    return 0;
}
int halHostRegister(void *pointer, uint64_t nbytes, unsigned flag, unsigned device, void **seen)
{
    (void)nbytes; (void)flag; (void)device;
    if (seen)
        *seen = pointer;
    return 0;
}

/* address ranges */
int halMemAddressReserve(void **pointer, size_t nbytes, size_t alignment, void *wanted, uint64_t flag)
{
    (void)alignment; (void)flag;
    void *range = mmap(wanted, nbytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
        return 1;
    *pointer = wanted ? range : (void *)(((uintptr_t)range + PAGE - 1) & ~(PAGE - 1));
    return stand_in_trace("halMemAddressReserve", *pointer);
}
int halMemGetAllocationGranularity(const void *properties, int option, size_t *granularity)
{
    (void)properties; (void)option;
    *granularity = PAGE;
    return 0;
}

/* memory handles: whose memory it is, and where it lies there */
struct handle {
    int pid;
    int unused;
    uint64_t address;
};
int halMemRetainAllocationHandle(void **handle, void *pointer)
{
    struct handle *made = calloc(1, sizeof *made);
    if (!made)
        return 1;
    made->pid = getpid();
    made->address = (uintptr_t)pointer;
    *handle = made;
    return stand_in_trace("halMemRetainAllocationHandle", pointer);
}
int halMemExportToShareableHandleV2(void *handle, int kind, uint64_t flag, void *shareable)
{
    (void)kind; (void)flag;
    memcpy(shareable, handle, sizeof(struct handle));
    return 0;
}
int halMemImportFromShareableHandleV2(int kind, void *shareable, unsigned device, void **handle)
{
    (void)kind; (void)device;
    struct handle *made = calloc(1, sizeof *made);
    if (!made)
        return 1;
    memcpy(made, shareable, sizeof *made);
    *handle = made;
    return 0;
}
int halMemTransShareableHandle(int kind, void *shareable, unsigned *server, uint64_t *value)
{
    (void)kind; (void)shareable;
    if (server)
        *server = 0;
    if (value)
        *value = 1;
    return 0;
}
int halMemMap(void *pointer, size_t nbytes, size_t offset, void *handle, uint64_t flag)
{
    struct handle *what = handle;
    (void)flag;
    stand_in_trace("halMemMap", pointer);
    return stand_in_map_peer(pointer, nbytes, what->pid, what->address + offset);
}
int halMemUnmap(void *pointer) { stand_in_unmap_peer(pointer, 0); return 0; }

/*
 * The queue of copy tasks: what is sent is done before the call returns. A task is 64 bytes: its kind in the low six bits of byte 0
 * (11 is a copy), its number at byte 6, length at 28, source at 32 and target at 40. The head that a caller waits for is the number
 * of the last task plus one, in a ring of 2048.
 */
#define QUEUES 65536
#define RING 2048
#define COPY_TASK 11

static uint32_t heads[QUEUES];
static uint32_t queues;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct task {
    uint8_t kind;
    uint8_t skipped[5];
    uint16_t number;
    uint8_t more[20];
    uint32_t nbytes;
    uint32_t source[2];
    uint32_t target[2];
    uint8_t rest[16];
} __attribute__((packed));

int halSqCqAllocate(unsigned device, void *wanted, unsigned *made)
{
    (void)device; (void)wanted;
    pthread_mutex_lock(&lock);
    made[0] = made[1] = queues;
    heads[queues % QUEUES] = 0;
    queues++;
    pthread_mutex_unlock(&lock);
    return 0;
}
int halSqCqQuery(unsigned device, unsigned *query)
{
    (void)device;
    query[5] = query[4] == 1 ? heads[query[2] % QUEUES] : 0; /* property 1 is the head */
    return 0;
}
int halSqTaskSend(unsigned device, void *info)
{
    uint32_t queue = ((uint32_t *)info)[2], count = ((uint32_t *)info)[6];
    struct task *tasks;
    (void)device;
    memcpy(&tasks, (char *)info + 16, sizeof tasks);
    for (uint32_t i = 0; i < count; i++) {
        const struct task *task = &tasks[i];
        if ((task->kind & 63) == COPY_TASK) {
            uint64_t source = task->source[0] | (uint64_t)task->source[1] << 32;
            uint64_t target = task->target[0] | (uint64_t)task->target[1] << 32;
            if (stand_in_copy((void *)target, (void *)source, task->nbytes))
                return 1;
        }
        heads[queue % QUEUES] = (task->number + 1u) % RING;
    }
    return 0;
}
