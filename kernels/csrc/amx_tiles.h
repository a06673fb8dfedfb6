/* What the kernels with tiles of AMX share. A tile is 16 rows of 64 bytes. */
#ifndef QS_AMX_TILES_H
#define QS_AMX_TILES_H

#include <stdint.h>

/* Makes the compiler write what lies at `memory` and elsewhere: gcc does not know what the instructions of tiles read. */
static inline __attribute__((always_inline)) void written(const void *memory)
{
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* What LDTILECFG reads. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

#endif
