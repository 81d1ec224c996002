/* bench/overlap_model.h - how well a step overlaps: the real engine on the simulated device and disk, in
 * virtual time, on the figures of a machine file.
 *
 * THE MODEL is Llama-3.1-8B's in its ratios, OVERLAP_SCALE times smaller, and all rates of the machine
 * are divided by the same number, so every transfer, update and visit takes the time it takes there:
 * 32 layers of 218.1M parameters, embedding and head of 525.3M each. A chunk is 16 times as many
 * parameters as by default (2,048 here, 8.4M there): coarser than a real run, so pipelines fill later.
 * Visits are of known length (forward 3.18 us a token and layer, backward twice that, head 19.9 us a
 * token: what `stoker plan` finds for an RTX 4090, scaled by the machine's FLOP rate); activations have
 * the sizes of a Llama layer (8 KiB a token at the border, 100 KiB inside).
 *
 * NOT IN IT: checksums and the engine's own thread take no time; the drive is one device.
 *
 * Everything is a function of the seed. Application's thread. */
#ifndef BENCH_OVERLAP_MODEL_H
#define BENCH_OVERLAP_MODEL_H

#include "engine/stoker.h"

#define OVERLAP_SCALE 4096u

enum overlap_clip { OVERLAP_QUIET, OVERLAP_BINDS, OVERLAP_SOMETIMES /* every third step */ };

struct overlap_case {
    const stk_machine *machine;
    uint32_t layers;            /* 0: 32; the 8B model's embedding and head shrink with it */
    uint32_t tokens, micro_tokens;
    bool nvme;                  /* optimizer state on NVMe; else all in memory */
    enum overlap_clip clip;
    stk_update update;
    stk_act activations;
    uint32_t keep_last, recompute_last; /* a mix: so many of the last layers, before those so many */
    bool predict_only;          /* nothing runs: predicted_s and host_bytes are all of the result */
    uint64_t buffer_bytes;      /* of the real machine: host memory between drive and update; 0: default */
    uint32_t split_blocks;      /* UINT32_MAX: the engine's choice */
    uint64_t seed;
    uint32_t steps;             /* 0: 10; the mean of the last six is the result */
    const char *trace;          /* file; NULL: none */
};

enum overlap_resource {
    OVERLAP_COMPUTE, OVERLAP_COPY_IN, OVERLAP_COPY_OUT, OVERLAP_LINK, OVERLAP_UPDATE, OVERLAP_DRAM,
    OVERLAP_DRIVE, OVERLAP_RESOURCES
};
const char *overlap_resource_name(enum overlap_resource r);

struct overlap_result {
    double step_s;
    double own_s[OVERLAP_RESOURCES]; /* bytes or FLOPs over the resource's own rate */
    enum overlap_resource busiest;
    double floor_s;             /* no schedule is faster; at least the busiest resource's time */
    const char *floor_text;
    struct { double nvme, copy, update, other; } wait_s;
    double spec_share;          /* of the chunks: updated before the norm was known */
    double undone_share;        /* of the chunks: taken back */
    double predicted_s;         /* what is predicted of the same plan, for norms as those of `clip`
                                 * (OVERLAP_SOMETIMES: that do not bind) */
    uint64_t host_bytes;        /* of the real machine */
    char note[160];             /* the engine's line about its update mode */
    char acts[160];             /* activations `auto`: what the engine chose */
};

/* False: *why has the sentence. */
bool overlap_run(const struct overlap_case *c, struct overlap_result *out, char *why, size_t why_size);

#endif
