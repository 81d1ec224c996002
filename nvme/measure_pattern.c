/* nvme/measure_pattern.c - what a measured block carries, and what a wrong one is called.
 *
 * Each 4 KiB begins with a mark: which measurement, file, offset and pass wrote it, and a CRC32C
 * over all of it. The rest is random words under a key that differs from block to block and from
 * pass to pass: nothing a drive could compress or take for one another. Pure functions; any
 * thread. Explaining is slow and only done for the first failure of a run. */
#include "nvme/measure_impl.h"
#include "base/rng.h"
#include "nvme/crc32c.h"

#include <stdio.h>
#include <string.h>

#define MAGIC 0x6b636f6c62727473u
#define WORDS (MEASURE_UNIT_BYTES / 8)
#define MARK_WORDS (sizeof(struct measure_mark) / 8)
#define SECTOR_BYTES 512u

void measure_pattern_init(struct measure_pattern *p, uint64_t id)
{
    struct rng r;
    p->id = id;
    rng_seed(&r, id);
    for (uint32_t i = 0; i < WORDS; i++) p->base[i] = rng_next(&r);
}

/* The checksum with the mark's own field zero: its bytes go in between two pieces. */
static uint32_t unit_crc(const uint8_t *unit)
{
    const uint32_t zero = 0;
    uint64_t at = offsetof(struct measure_mark, crc);
    uint32_t crc = crc32c(crc32c(0, unit, at), &zero, sizeof zero);
    return crc32c(crc, unit + at + 4, MEASURE_UNIT_BYTES - at - 4);
}

void measure_pattern_fill(const struct measure_pattern *p, uint8_t *unit, uint32_t file,
                          uint64_t offset_bytes, uint64_t pass)
{
    struct measure_mark mark = {
        .magic = MAGIC, .id = p->id, .file = file, .offset_bytes = offset_bytes, .pass = pass
    };
    uint64_t key = rng_hash64(p->id ^ rng_hash64(offset_bytes ^ rng_hash64(pass << 16 ^ file)));
    uint64_t *w = (uint64_t *)(void *)unit; /* buffers are aligned to pages */
    memcpy(unit, &mark, sizeof mark);
    for (uint32_t i = MARK_WORDS; i < WORDS; i++) w[i] = p->base[i] ^ key;
    mark.crc = unit_crc(unit);
    memcpy(unit, &mark, sizeof mark);
}

static bool whole(const uint8_t *unit, struct measure_mark *mark)
{
    memcpy(mark, unit, sizeof *mark);
    return mark->magic == MAGIC && mark->crc == unit_crc(unit);
}

bool measure_pattern_check(const struct measure_pattern *p, const uint8_t *unit, uint32_t file,
                           uint64_t offset_bytes, uint64_t pass)
{
    struct measure_mark mark;
    return whole(unit, &mark) && mark.id == p->id && mark.file == file &&
           mark.offset_bytes == offset_bytes && mark.pass == pass;
}

/* --- words for what was found ----------------------------------------------------------------- */

static bool is_zero(const uint8_t *unit)
{
    return unit[0] == 0 && memcmp(unit, unit + 1, MEASURE_UNIT_BYTES - 1) == 0;
}

/* A whole unit, but not the one that belongs here. */
static void explain_whole(const struct measure_pattern *p, const struct measure_mark *mark,
                          uint32_t file, uint64_t offset_bytes, uint64_t pass, char *buf,
                          size_t size_bytes)
{
    unsigned long long at = mark->offset_bytes, n = mark->pass;
    if (mark->id != p->id)
        snprintf(buf, size_bytes, "a block of another measurement (its file %u, byte %llu)",
                 mark->file, at);
    else if (mark->file != file || mark->offset_bytes != offset_bytes)
        snprintf(buf, size_bytes,
                 "another block's content (file %u, byte %llu, pass %llu): a transfer went to "
                 "the wrong place",
                 mark->file, at, n);
    else if (mark->pass < pass)
        snprintf(buf, size_bytes, "an older pass (%llu): a write was acknowledged and lost", n);
    else
        snprintf(buf, size_bytes, "pass %llu, which had not been asked for: a second writer", n);
}

static uint32_t bits_between(const uint8_t *a, const uint8_t *b, uint64_t *first)
{
    uint32_t n = 0;
    for (uint64_t i = MEASURE_UNIT_BYTES; i-- > 0;) {
        if (a[i] == b[i]) continue;
        n += (uint32_t)__builtin_popcount((unsigned)(a[i] ^ b[i]));
        *first = i;
    }
    return n;
}

/* How many sectors are those of this pass, given by `like`. */
static uint32_t sectors_like(const uint8_t *unit, const uint8_t *like)
{
    uint32_t n = 0;
    for (uint64_t at = 0; at < MEASURE_UNIT_BYTES; at += SECTOR_BYTES)
        n += memcmp(unit + at, like + at, SECTOR_BYTES) == 0;
    return n;
}

static bool explain_torn(const struct measure_pattern *p, const uint8_t *unit, uint32_t file,
                         uint64_t offset_bytes, uint64_t pass, char *buf, size_t size_bytes)
{
    _Alignas(8) uint8_t like[MEASURE_UNIT_BYTES];
    uint32_t all = MEASURE_UNIT_BYTES / SECTOR_BYTES;
    measure_pattern_fill(p, like, file, offset_bytes, pass);
    uint32_t now = sectors_like(unit, like);
    for (uint64_t back = 1; now > 0 && back <= 16 && back < pass; back++) {
        measure_pattern_fill(p, like, file, offset_bytes, pass - back);
        uint32_t old = sectors_like(unit, like);
        if (old == 0 || now + old < all) continue;
        snprintf(buf, size_bytes,
                 "a torn write: %u of its %u sectors are of pass %llu, the others of this one",
                 old, all, (unsigned long long)(pass - back));
        return true;
    }
    return false;
}

void measure_pattern_explain(const struct measure_pattern *p, const uint8_t *unit, uint32_t file,
                             uint64_t offset_bytes, uint64_t pass, char *buf, size_t size_bytes)
{
    struct measure_mark mark;
    _Alignas(8) uint8_t want[MEASURE_UNIT_BYTES];
    uint64_t first = 0, word;
    if (whole(unit, &mark)) {
        explain_whole(p, &mark, file, offset_bytes, pass, buf, size_bytes);
        return;
    }
    if (is_zero(unit)) {
        snprintf(buf, size_bytes, "zeros: never written, or discarded");
        return;
    }
    if (explain_torn(p, unit, file, offset_bytes, pass, buf, size_bytes)) return;
    measure_pattern_fill(p, want, file, offset_bytes, pass);
    uint32_t bits = bits_between(unit, want, &first);
    memcpy(&word, unit + (first & ~7ull), 8);
    if (bits <= 64)
        snprintf(buf, size_bytes, "%u flipped bit%s, the first in byte %llu of the block", bits,
                 bits == 1 ? "" : "s", (unsigned long long)(offset_bytes + first));
    else
        snprintf(buf, size_bytes,
                 "other bytes (0x%016llx at byte %llu): no block of this measurement",
                 (unsigned long long)word, (unsigned long long)(offset_bytes + (first & ~7ull)));
}
