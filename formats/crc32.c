/* formats/crc32.c - CRC-32 (IEEE), eight bytes a turn.
 *
 * Owns: nothing; the tables are the caller's. Must not know: files.
 * The eight tables (M. Kounavis, F. Berry: "A systematic approach to building high performance
 * software-based CRC generators", 2005): t[k][b] is the remainder of byte b followed by k zero
 * bytes, so that eight bytes are looked up independently and summed.
 * Thread: any. */
#include "formats/crc32.h"

void crc32_prepare(struct crc32_tables *tables)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t r = b;
        for (int bit = 0; bit < 8; bit++) r = (r >> 1) ^ (0xedb88320u & (0u - (r & 1)));
        tables->t[0][b] = r;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < 8; k++) {
            uint32_t before = tables->t[k - 1][b];
            tables->t[k][b] = (before >> 8) ^ tables->t[0][before & 0xff];
        }
}

static uint32_t load_le32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint32_t crc32_extend(const struct crc32_tables *tables, uint32_t crc, const void *buf,
                      size_t size_bytes)
{
    const uint32_t(*t)[256] = tables->t;
    const unsigned char *p = buf;
    uint32_t c = ~crc;
    for (; size_bytes >= 8; size_bytes -= 8, p += 8) {
        uint32_t low = load_le32(p) ^ c, high = load_le32(p + 4);
        c = t[7][low & 0xff] ^ t[6][(low >> 8) & 0xff] ^ t[5][(low >> 16) & 0xff] ^
            t[4][low >> 24] ^ t[3][high & 0xff] ^ t[2][(high >> 8) & 0xff] ^
            t[1][(high >> 16) & 0xff] ^ t[0][high >> 24];
    }
    for (; size_bytes > 0; size_bytes--, p++) c = (c >> 8) ^ t[0][(c ^ *p) & 0xff];
    return ~c;
}
