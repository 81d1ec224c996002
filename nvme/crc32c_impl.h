/* nvme/crc32c_impl.h - the variants of crc32c that live in files of their own. Private to
 * crc32c*.c. */
#ifndef NVME_CRC32C_IMPL_H
#define NVME_CRC32C_IMPL_H
#include <stdint.h>
#if defined(__x86_64__)
uint32_t crc32c_x86(uint32_t crc, const void *buf, uint64_t size_bytes);
int crc32c_x86_usable(void); /* the processor has SSE4.2 and carry-less multiplication */
uint32_t crc32c_avx512(uint32_t crc, const void *buf, uint64_t size_bytes);
int crc32c_avx512_usable(void); /* and AVX-512 with carry-less multiplication of 512 bits */

/* What crc32c_avx512 moves sixteen bytes past `bits` bits with: x^(bits+31) mod P for the first
 * eight, x^(bits-33) mod P for the second, reflected. For tests. */
struct crc32c_fold { uint32_t bits, first, second; };
extern const struct crc32c_fold crc32c_folds[2];
#endif
#endif
