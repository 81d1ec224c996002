/* base/rng.c - xoshiro256** and what is drawn from it.
 *
 * Owns: nothing, the state is the caller's. Must not know: what the numbers are for.
 * Source: Blackman and Vigna, "Scrambled linear pseudorandom number generators" (2018); bounded
 * integers by Lemire, "Fast random integer generation in an interval" (2019). Integers and
 * rng_uniform are the same on every machine; rng_normal is as far as the C library's log and cos
 * are. Thread: the one that owns the state. */
#include "base/rng.h"

#include <math.h>

__extension__ typedef unsigned __int128 rng_u128;

static const uint64_t golden = 0x9e3779b97f4a7c15u;

uint64_t rng_hash64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* splitmix64: the finaliser over a counter. Four successive outputs are never all zero, as it is
 * a bijection. */
void rng_seed(struct rng *r, uint64_t seed)
{
    for (int i = 0; i < 4; i++) r->s[i] = rng_hash64(seed += golden);
}

void rng_seed_stream(struct rng *r, uint64_t seed, uint64_t stream)
{
    /* Both go through the finaliser before they meet, else (seed, stream + 1) and (seed + 1,
     * stream) could overlap. */
    rng_seed(r, rng_hash64(seed + golden) ^ rng_hash64(rng_hash64(stream + golden) + golden));
}

static uint64_t rotate_left(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }

uint64_t rng_next(struct rng *r)
{
    uint64_t *s = r->s, result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

uint64_t rng_below(struct rng *r, uint64_t n)
{
    rng_u128 product = (rng_u128)rng_next(r) * n;
    if ((uint64_t)product < n) {
        uint64_t threshold = (0 - n) % n; /* 2^64 mod n: so many low halves would be one too many */
        while ((uint64_t)product < threshold) product = (rng_u128)rng_next(r) * n;
    }
    return (uint64_t)(product >> 64);
}

double rng_uniform(struct rng *r) { return (double)(rng_next(r) >> 11) * 0x1p-53; }

double rng_normal(struct rng *r)
{
    double u = 1.0 - rng_uniform(r), v = rng_uniform(r); /* u in (0, 1]: its logarithm is finite */
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586476925 * v);
}

void rng_shuffle_u32(struct rng *r, uint32_t *v, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = (uint32_t)rng_below(r, i), t = v[i - 1];
        v[i - 1] = v[j];
        v[j] = t;
    }
}
