/* nvme/crc32c.h - CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected; RFC 3720 appendix B.4 has
 * test vectors). Variants from one list, equal in result; picked once by cpu features. Any
 * thread. */
#ifndef NVME_CRC32C_H
#define NVME_CRC32C_H
#include <stddef.h>
#include <stdint.h>
/* start with 0; may be chained */
uint32_t crc32c(uint32_t crc, const void *buf, uint64_t size_bytes);
const char *crc32c_variant(void);
/* The checksum of a message made in parts, by any threads in any order: the xor of all parts, each with
 * the number of bytes that follow it in the message; bytes that belong to no part count as zeros. Then the
 * whole, once, of a message of so many bytes. crc32c_whole(crc32c_part(p, n, 0), n) is crc32c(0, p, n). */
uint32_t crc32c_part(const void *buf, uint64_t size_bytes, uint64_t behind_bytes);
uint32_t crc32c_whole(uint32_t parts, uint64_t size_bytes);
/* The variants, for tests and bench: name NULL ends. */
struct crc32c_kernel {
    const char *name;
    uint32_t (*fn)(uint32_t, const void *, uint64_t);
    int (*usable)(void);
};
extern const struct crc32c_kernel crc32c_kernels[];
#endif
