/* bench/store_pairs.c - what the extent store costs beside plain transfers, and what its checksums
 * cost: the same reads or writes three ways in turn, in random order within a round. All three move
 * the same blocks of one file of extents through the same memory, so that nothing else differs.
 * Each way runs twice in a round, in an order and in its reverse, for half of --run each: a drive
 * that becomes slower meanwhile does so for all three.
 *
 *     store_pairs --dir DIR [--mode read|write] [--block 1MiB] [--depth 16] [--size 1GiB]
 *                 [--rounds 5] [--run 1.5] [--lanes 1] [--seed 1]
 *
 * Prints one JSON line a round: {"plain": bytes/s, "store": ..., "store_no_checksums": ...}.
 * bench/nvme_pairs.py reads them. Own process. */
#include "base/opts.h"
#include "base/rng.h"
#include "nvme/measure_store.h"

#include <stdio.h>
#include <string.h>

struct pairs_args {
    const char *dir;
    int mode;
    uint64_t block, depth, size, rounds, lanes, seed;
    double run_s;
};

static const char *const mode_names[] = { "read", "write", NULL };

static const struct opt_row rows[] = {
    { "dir", OPT_STRING, offsetof(struct pairs_args, dir), .required = true },
    { "mode", OPT_CHOICE, offsetof(struct pairs_args, mode), "read", .choices = mode_names },
    { "block", OPT_SIZE, offsetof(struct pairs_args, block), "1MiB", 4096, 1 << 30 },
    { "depth", OPT_U64, offsetof(struct pairs_args, depth), "16", 1, 1024 },
    { "size", OPT_SIZE, offsetof(struct pairs_args, size), "1GiB", 1 << 20, 1e12 },
    { "rounds", OPT_U64, offsetof(struct pairs_args, rounds), "5", 1, 1000 },
    { "run", OPT_DOUBLE, offsetof(struct pairs_args, run_s), "1.5", 0.05, 600 },
    { "lanes", OPT_U64, offsetof(struct pairs_args, lanes), "1", 1, 16 },
    { "seed", OPT_U64, offsetof(struct pairs_args, seed), "1", 0, 1e15 },
};
enum { ROW_N = sizeof rows / sizeof rows[0], WAYS = 3 };
static const char *const way_names[WAYS] = { "plain", "store", "store_no_checksums" };

/* m[0]: plain; m[1]: the store, with and without its checksums. */
static stk_status open_ways(const struct pairs_args *a, const struct measure_cfg *cfg,
                            struct measure **m, struct stk_error *err)
{
    struct measure_store_cfg s = { .plain = *cfg, .checksum_lanes = (uint32_t)a->lanes };
    STK_TRY(measure_store_open(&s, &m[1], err));
    return measure_store_plain(m[1], &m[0], err);
}

static stk_status run_way(struct measure **m, uint32_t way, const struct measure_cfg *cfg,
                          struct measure_result *res, struct stk_error *err)
{
    if (way > 0) measure_store_checksums(m[1], way == 1);
    return measure_run(m[way > 0], cfg, res, err);
}

static stk_status run_round(const struct pairs_args *a, struct measure_cfg *cfg, struct rng *rng,
                            struct measure **m, struct measure_result *res, struct stk_error *err)
{
    uint32_t order[WAYS] = { 0, 1, 2 };
    double bytes[WAYS] = { 0 }, seconds[WAYS] = { 0 };
    rng_shuffle_u32(rng, order, WAYS);
    for (int k = 0; k < 2 * WAYS; k++) {
        uint32_t way = order[k < WAYS ? k : 2 * WAYS - 1 - k];
        cfg->seed = rng_next(rng);
        STK_TRY(run_way(m, way, cfg, res, err));
        if (res->verify_failures)
            return stk_error_set(err, STK_ERR_CORRUPT, 0, "%s: %s", a->dir, res->first_failure);
        bytes[way] += (double)res->bytes;
        seconds[way] += (double)res->ns * 1e-9;
    }
    printf("{\"bench\": \"store_pairs\", \"mode\": \"%s\", \"block_bytes\": %llu, \"depth\": %llu, "
           "\"direct\": %s",
           mode_names[a->mode], (unsigned long long)a->block, (unsigned long long)a->depth,
           res->direct ? "true" : "false");
    for (int k = 0; k < WAYS; k++) printf(", \"%s\": %.0f", way_names[k], bytes[k] / seconds[k]);
    printf("}\n");
    fflush(stdout);
    return STK_OK;
}

static stk_status run_all(const struct pairs_args *a, struct stk_error *err)
{
    struct measure *m[2] = { NULL };
    static struct measure_result res;
    struct rng rng;
    struct measure_cfg cfg = { .paths = { a->dir }, .n_paths = 1,
                               .file_bytes = a->size / a->block * a->block,
                               .mode = a->mode ? MEASURE_WRITE : MEASURE_READ,
                               .block_bytes = a->block, .depth = (uint32_t)a->depth,
                               .seed = a->seed, .ramp_ns = (uint64_t)(a->run_s * 0.1e9),
                               .run_ns = (uint64_t)(a->run_s * 0.5e9) };
    rng_seed(&rng, a->seed);
    stk_status st = open_ways(a, &cfg, m, err);
    for (uint64_t k = 0; k < a->rounds && st == STK_OK; k++)
        st = run_round(a, &cfg, &rng, m, &res, err);
    measure_close(m[0]);
    measure_close(m[1]);
    return st;
}

int main(int argc, char **argv)
{
    struct pairs_args a;
    struct stk_error err = { 0 };
    stk_status st = opts_parse(rows, ROW_N, argc - 1, argv + 1, &a, NULL, NULL, &err);
    if (st == STK_OK) {
        st = run_all(&a, &err);
        opts_free(rows, ROW_N, &a);
    }
    if (st == STK_OK) return 0;
    fprintf(stderr, "store_pairs: %s\n", err.text);
    return 1;
}
