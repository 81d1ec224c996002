/* nvme/crc32c_impl.h - the variants of crc32c that live in files of their own. Private to
 * crc32c*.c. */
#ifndef NVME_CRC32C_IMPL_H
#define NVME_CRC32C_IMPL_H
#include <stdint.h>
#if defined(__x86_64__)
uint32_t crc32c_x86(uint32_t crc, const void *buf, uint64_t size_bytes);
int crc32c_x86_usable(void); /* the processor has SSE4.2 and carry-less multiplication */
#endif
#endif
