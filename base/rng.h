/* base/rng.h - seeded random numbers: the same on every machine. xoshiro256** seeded by splitmix64
 * (Blackman, Vigna, "Scrambled linear pseudorandom number generators", 2018). Caller-owned state;
 * not for secrets. */
#ifndef BASE_RNG_H
#define BASE_RNG_H

#include <stdint.h>

struct rng { uint64_t s[4]; };

void rng_seed(struct rng *r, uint64_t seed);
/* An independent stream of the same seed (one per tensor, per epoch ...). */
void rng_seed_stream(struct rng *r, uint64_t seed, uint64_t stream);
uint64_t rng_next(struct rng *r);
uint64_t rng_below(struct rng *r, uint64_t n);   /* uniform in [0, n), no modulo bias; n >= 1 */
double rng_uniform(struct rng *r);               /* [0, 1), 53 bits */
double rng_normal(struct rng *r);                /* mean 0, variance 1; Box-Muller, one value per
                                                  * call */
void rng_shuffle_u32(struct rng *r, uint32_t *v, uint32_t n); /* Fisher-Yates */
uint64_t rng_hash64(uint64_t x);                 /* splitmix64 finaliser */

#endif
