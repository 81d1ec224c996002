/* formats/crc32.h - CRC-32 of the files of a checkpoint: polynomial 0x04C11DB7 reflected (IEEE
 * 802.3, as zlib and gzip), initial value and final exclusive-or 0xffffffff. The tables are made
 * when they are needed and belong to the caller: no global state. */
#ifndef FORMATS_CRC32_H
#define FORMATS_CRC32_H

#include <stddef.h>
#include <stdint.h>

struct crc32_tables {
    uint32_t t[8][256];
    uint64_t fold[4]; /* crc32_x86.c; 0: this processor cannot */
};

void crc32_prepare(struct crc32_tables *tables);
/* `crc` is 0 at first, then the value returned before. crc32 of "123456789" is 0xcbf43926. */
uint32_t crc32_extend(const struct crc32_tables *tables, uint32_t crc, const void *buf,
                      size_t size_bytes);
/* Of a text `a` followed by a text `b` of b_bytes, from the checksums of both. */
uint32_t crc32_join(uint32_t a, uint32_t b, uint64_t b_bytes);

#endif
