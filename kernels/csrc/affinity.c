/* The CPUs on which a thread may run. Only Linux lets a program set them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>

#include "internal.h"

#ifdef __linux__
static cpu_set_t *set_of(qs_cpus *cpus)
{
    return (cpu_set_t *)cpus->words;
}

int32_t qs_pin(pthread_t thread, int32_t cpu, qs_cpus *before)
{
    qs_cpus only = {{0}};
    if (cpu < 0 || cpu >= QS_MAX_CPUS || (before && pthread_getaffinity_np(thread, sizeof *before, set_of(before))))
        return -1;
    CPU_SET_S((size_t)cpu, sizeof only, set_of(&only));
    return pthread_setaffinity_np(thread, sizeof only, set_of(&only)) ? -1 : 0;
}

void qs_unpin(pthread_t thread, qs_cpus *before)
{
    pthread_setaffinity_np(thread, sizeof *before, set_of(before));
}
#else
int32_t qs_pin(pthread_t thread, int32_t cpu, qs_cpus *before)
{
    (void)thread, (void)cpu, (void)before;
    return -1;
}

void qs_unpin(pthread_t thread, qs_cpus *before)
{
    (void)thread, (void)before;
}
#endif
