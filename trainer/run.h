/* trainer/run.h - what every verb that computes shares: a model folder and a token file open, an
 * engine sealed around them, parameters loaded, batches brought, evaluation.
 *
 * Order: run_open (reads headers only; nothing is written), run_seal, run_load or stk_restore, then
 * steps; run_close at any time. All memory of the run beyond headers is reserved at run_seal.
 * Application's thread. */
#ifndef TRAINER_RUN_H
#define TRAINER_RUN_H

#include "formats/tokens.h"
#include "nvme/io_sim.h"
#include "trainer/options.h"
#include "trainer/pulse.h"
#include "trainer/source.h"

struct run {
    const struct run_opts *opts; /* borrowed */
    const stk_machine *machine;  /* plan for it (then no weights are read); borrowed, NULL: this one */
    struct source src;
    struct tokens *data;
    struct model *model;
    stk_engine *e;
    struct pulse *pulse;          /* borrowed; may be NULL */
    struct io_sim_disk *sim_disk; /* --storage sim */
    struct io_sim_cfg sim;
    uint32_t h_buf;
    double seal_s;                /* what making memory, files and pools ready took; 0: dry */
    void *buf;                                     /* RUN_BUF_BYTES, after run_seal */
    int32_t *ids, *targets, *position, *first_key; /* of one micro-batch */
};

#define RUN_BUF_BYTES (4ull << 20)

/* `eval`: forward only, no gradients or state (MEM-11); `logits`: keep them. */
stk_status run_open(struct run *r, const struct run_opts *o, bool eval, bool logits,
                    struct stk_error *err);
stk_status run_seal(struct run *r, bool dry, struct stk_error *err);
/* Streams every tensor of the folder into the engine through the fixed buffer. STK_ERR_INTERRUPTED
 * after a signal. */
stk_status run_load(struct run *r, struct stk_error *err);
void run_close(struct run *r);

/* The engine's sentence becomes err's. */
stk_status run_engine(const struct run *r, stk_status st, struct stk_error *err);

/* Queues micro-batch `micro` from the given windows (seq each, micro_batch of them; UINT64_MAX: an
 * empty row without targets). Adds to *n_targets. */
stk_status run_inputs(struct run *r, struct tokens *data, uint32_t micro, const uint64_t *windows,
                      uint64_t *n_targets, struct stk_error *err);
/* The visits of a step or an evaluation, until the engine says that there are no more. */
stk_status run_visits(struct run *r, struct stk_error *err);

struct run_eval {
    double loss, perplexity;
    uint64_t targets, windows;
};
/* Mean loss over all windows of data. `sink` (may be NULL) gets the logits of each window in order:
 * [seq, vocab] floats. */
typedef stk_status run_logits_fn(void *arg, uint64_t window, const float *logits,
                                 struct stk_error *err);
stk_status run_evaluate(struct run *r, struct tokens *data, run_logits_fn *sink, void *arg,
                        struct run_eval *out, struct stk_error *err);

/* run_paths.c. An output file of `option` (path NULL: none), written in place or replaced at the
 * end: its folder can be written to, it is no folder, no input of the run and no output of another
 * option. */
stk_status run_check_output(const struct run_opts *o, const char *option, const char *path,
                            bool in_place, struct stk_error *err);
/* --nvme: folders, each given once. */
stk_status run_check_nvme(const struct run_opts *o, struct stk_error *err);

#endif
