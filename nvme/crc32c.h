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
/* The variants, for tests and bench: name NULL ends. */
struct crc32c_kernel {
    const char *name;
    uint32_t (*fn)(uint32_t, const void *, uint64_t);
    int (*usable)(void);
};
extern const struct crc32c_kernel crc32c_kernels[];
#endif
