/* bench/limit_isa.c - the loops of limit.h, compiled once per instruction set (LIMIT_ISA names it).
 *
 * Owns nothing. Must not know what is measured with them. Called only after the dispatch in limit.c
 * has asked the processor. Any thread. */
#include "bench/limit.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
typedef __m512i vec;
INLINE vec load(const uint8_t *p) { return _mm512_load_si512(p); }
INLINE void store(uint8_t *p, vec v) { _mm512_store_si512(p, v); }
INLINE void store_stream(uint8_t *p, vec v) { _mm512_stream_si512((__m512i *)(void *)p, v); }
INLINE vec set(uint64_t x) { return _mm512_set1_epi64((long long)x); }
#elif defined(__AVX2__)
typedef __m256i vec;
INLINE vec load(const uint8_t *p) { return _mm256_load_si256((const __m256i *)(const void *)p); }
INLINE void store(uint8_t *p, vec v) { _mm256_store_si256((__m256i *)(void *)p, v); }
INLINE void store_stream(uint8_t *p, vec v) { _mm256_stream_si256((__m256i *)(void *)p, v); }
INLINE vec set(uint64_t x) { return _mm256_set1_epi64x((long long)x); }
#else
typedef __m128i vec;
INLINE vec load(const uint8_t *p) { return _mm_load_si128((const __m128i *)(const void *)p); }
INLINE void store(uint8_t *p, vec v) { _mm_store_si128((__m128i *)(void *)p, v); }
INLINE void store_stream(uint8_t *p, vec v) { _mm_stream_si128((__m128i *)(void *)p, v); }
INLINE vec set(uint64_t x) { return _mm_set1_epi64x((long long)x); }
#endif

/* What a loop keeps while it runs. */
struct walk {
    vec zero, seen;
    uint64_t ahead;
};

INLINE void fetch(const struct walk *w, const uint8_t *p, uint64_t bytes)
{
    if (!w->ahead) return;
    uintptr_t at = (uintptr_t)p + (uintptr_t)(w->ahead * bytes);
    for (uint64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const void *)(at + b));
}

INLINE void put(uint8_t *p, vec v, bool stream)
{
    if (stream) store_stream(p, v);
    else store(p, v);
}

/* One group of an array whose elements have `width` bytes. */
INLINE void read_write(struct walk *w, uint8_t *base, uint64_t i, uint64_t width, bool stream)
{
    uint8_t *p = base + i * width * LIMIT_GROUP;
    fetch(w, p, width * LIMIT_GROUP);
    for (uint64_t b = 0; b < width * LIMIT_GROUP; b += sizeof(vec))
        put(p + b, load(p + b) ^ w->zero, stream);
}

INLINE void read_only(struct walk *w, const uint8_t *base, uint64_t i, uint64_t width)
{
    const uint8_t *p = base + i * width * LIMIT_GROUP;
    fetch(w, p, width * LIMIT_GROUP);
    for (uint64_t b = 0; b < width * LIMIT_GROUP; b += sizeof(vec)) w->seen |= load(p + b);
}

/* The first bytes of `from`'s group into the group of `to`. */
INLINE void copy(struct walk *w, uint8_t *to, uint64_t to_width, const uint8_t *from,
                 uint64_t from_width, uint64_t i, bool stream)
{
    const uint8_t *p = from + i * from_width * LIMIT_GROUP;
    uint8_t *q = to + i * to_width * LIMIT_GROUP;
    for (uint64_t b = 0; b < to_width * LIMIT_GROUP; b += sizeof(vec))
        put(q + b, load(p + b) ^ w->zero, stream);
    (void)w;
}

#define LOOP(name, body)                                                                           \
    INLINE void name##_loop(struct walk *w, const struct limit_job *j, uint64_t from, uint64_t to, \
                            bool stream)                                                           \
    {                                                                                              \
        for (uint64_t i = from; i < to; i++) { body }                                              \
        if (stream) _mm_sfence();                                                                  \
    }                                                                                              \
    static uint64_t name(const struct limit_job *j, uint64_t from, uint64_t to)                    \
    {                                                                                              \
        struct walk w = { set(j->zero), set(j->zero), j->ahead };                                  \
        if (j->stream) name##_loop(&w, j, from, to, true);                                         \
        else name##_loop(&w, j, from, to, false);                                                  \
        uint64_t seen[sizeof(vec) / 8] __attribute__((aligned(64)));                               \
        store((uint8_t *)seen, w.seen);                                                            \
        return seen[0];                                                                            \
    }
#define RW(k, width) read_write(w, j->base[k], i, width, stream);
#define RD(k, width) read_only(w, j->base[k], i, width);

LOOP(bf16_split, RW(0, 2) RW(1, 2) RW(2, 4) RW(3, 4) RD(4, 2))
LOOP(fp16, RD(4, 2) copy(w, j->base[0], 2, j->base[4], 2, i, stream); RW(1, 4) RW(2, 4) RW(3, 4))
LOOP(f32, RW(0, 4) RW(2, 4) RW(3, 4) RD(4, 4))
LOOP(moments_bf16, RW(0, 2) RW(1, 2) RW(2, 2) RW(3, 2) RD(4, 2))
LOOP(moments_8bit, RW(0, 2) RW(1, 2) RW(2, 1) RW(3, 1) RD(4, 2))
LOOP(one, RW(0, 4))
LOOP(read4, RD(0, 4))
LOOP(copy4, fetch(w, j->base[0] + i * 256, 256); copy(w, j->base[1], 4, j->base[0], 4, i, stream);)
LOOP(cast, RD(0, 4) copy(w, j->base[1], 2, j->base[0], 4, i, stream);)

#define NAME_OF(isa) limit_loops_##isa
#define NAME(isa) NAME_OF(isa)
extern const limit_fn NAME(LIMIT_ISA)[LIMIT_SHAPE_N];
const limit_fn NAME(LIMIT_ISA)[LIMIT_SHAPE_N] = {
    [LIMIT_BF16_SPLIT] = bf16_split, [LIMIT_FP16] = fp16, [LIMIT_F32] = f32, [LIMIT_ONE] = one,
    [LIMIT_MOMENTS_BF16] = moments_bf16, [LIMIT_MOMENTS_8BIT] = moments_8bit,
    [LIMIT_READ] = read4,            [LIMIT_COPY] = copy4, [LIMIT_CAST] = cast,
};
