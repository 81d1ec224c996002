/* formats/crc32_impl.h - the part of CRC-32 that lives in a file of its own, because of its compiler
 * flags. Private to crc32*.c. */
#ifndef FORMATS_CRC32_IMPL_H
#define FORMATS_CRC32_IMPL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
bool crc32_x86_usable(void); /* carry-less multiplication */
/* Folds size_bytes (a multiple of 16, at least 64) and the register before them into 16 bytes that
 * leave the same remainder. */
void crc32_x86_fold(const uint64_t fold[4], uint32_t c, const void *buf, size_t size_bytes,
                    unsigned char rest[16]);
#else
static inline bool crc32_x86_usable(void) { return false; }
static inline void crc32_x86_fold(const uint64_t fold[4], uint32_t c, const void *buf,
                                  size_t size_bytes, unsigned char rest[16])
{
    (void)fold, (void)c, (void)buf, (void)size_bytes, (void)rest;
}
#endif

#endif
