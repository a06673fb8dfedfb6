/* How the ranks of a model wait for each other, behind the pool of program.c. What they exchange lies in memory that all
 * of them share, so waiting is all there is to do. */
#include <time.h>

#define RANK_LINE 16      /* of int32: a line of the processor's caches */
#define LOOK 100000000    /* nanoseconds after which a sleeper looks whether a rank has ended */

/* Returns whether a rank has come to `turn`: spins, then sleeps. The words are those of its line. */
static int has_come(atomic_int *words, int32_t turn, atomic_int *ended)
{
    for (int i = 0; i < SPIN; i++) {
        if ((int32_t)((uint32_t)atomic_load_explicit(words, memory_order_acquire) - (uint32_t)turn) >= 0)
            return 1;
        relax();
    }
    int here = 0;
    atomic_fetch_add(words + 1, 1);
    for (int32_t seen; !(here = (int32_t)((uint32_t)(seen = atomic_load(words)) - (uint32_t)turn) >= 0);) {
        if (atomic_load(ended))
            break;
#ifdef __linux__
        struct timespec look = {0, LOOK};
        syscall(SYS_futex, words, FUTEX_WAIT, seen, &look, NULL, 0);
#else
        usleep(50);
#endif
    }
    atomic_fetch_sub(words + 1, 1);
    return here;
}

int32_t qs_arrive(const qs_ranks *ranks)
{
    atomic_int *mine = (atomic_int *)ranks->counters + RANK_LINE * ranks->rank;
    int32_t turn = (int32_t)((uint32_t)atomic_load_explicit(mine, memory_order_relaxed) + 1u);
    atomic_store(mine, turn);
#ifdef __linux__
    if (atomic_load(mine + 1))
        syscall(SYS_futex, mine, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
#endif
    return turn;
}

int32_t qs_await(const qs_ranks *ranks, int32_t rank, int32_t turn)
{
    atomic_int *lines = (atomic_int *)ranks->counters;
    return has_come(lines + RANK_LINE * rank, turn, lines + RANK_LINE * ranks->size) ? 0 : -3;
}

int32_t qs_meet(const qs_ranks *ranks)
{
    int32_t turn = qs_arrive(ranks);
    for (int32_t i = 0; i < ranks->size; i++)
        if (i != ranks->rank && qs_await(ranks, i, turn))
            return -3;
    return 0;
}

/* One thread waits for the other ranks, and the others for it. Where a rank has ended, what follows computes rubbish. */
static void meet_others(qs_pool *pool, struct phase *phase, const qs_ranks *ranks)
{
    int32_t mine = 0;
    if (take(phase) == 0) {
        if (qs_meet(ranks))
            atomic_store(&pool->lost, 1);
        mine = 1;
    }
    settle(pool, phase, 1, mine);
}
