/* gpu/host/kernels/amx.h - tile registers of AMX (Intel SDM volume 1, chapter 18) as the kernels of
 * attention_amx.c and product_amx.c use them: squares of 32 x 32 in tiles 0..3 (C), 4 and 5 (A), 6 and
 * 7 (B). Included by these two only, which are compiled for AMX. Each thread of a team opens its own
 * and gives them back with _tile_release. */
#ifndef GPU_HOST_KERNELS_AMX_H
#define GPU_HOST_KERNELS_AMX_H

#include <immintrin.h>
#include <stdint.h>

struct amx_config { /* what LDTILECFG reads */
    uint8_t palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct amx_config) == 64, "as the processor reads it");

/* gcc's tile intrinsics do not say which memory they read and write. */
#define AMX_MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

/* For squares of so many rows, 1 to 32: C and A have them, at least 1 in each tile. What tiles held is
 * lost. */
static inline void amx_tiles_open(uint64_t rows)
{
    uint8_t low = rows < 16 ? (uint8_t)rows : 16, high = rows > 16 ? (uint8_t)(rows - 16) : 1;
    struct amx_config c = { .palette = 1 };
    for (int i = 0; i < 8; i++) c.row_bytes[i] = 64, c.rows[i] = 16;
    c.rows[0] = c.rows[1] = c.rows[4] = low;
    c.rows[2] = c.rows[3] = c.rows[5] = high;
    __asm__ volatile("" ::"r"(&c) : "memory");
    _tile_loadconfig(&c);
}

#endif
