/* trainer/hf_out.h - writes a Hugging Face model folder as a stream: config.json in the spelling it
 * was read in, model.safetensors (or shards of at most 5 GB with an index), tokenizer and
 * generation files copied from the source.
 *
 * Everything is written into a folder of its own (`partial`), checked there (every header is read
 * again against the configuration, CKP-07), and then moved: so a killed export leaves nothing that
 * looks like a model. Memory: the caller's buffer. Blocking; application's thread. */
#ifndef TRAINER_HF_OUT_H
#define TRAINER_HF_OUT_H

#include "formats/model_config.h"
#include "trainer/pulse.h"

/* Fills `out` with n 16-bit values from element `first` of the tensor that the model calls `name`.
 */
typedef stk_status hf_read_fn(void *arg, const struct model_tensor *t, uint64_t first, uint64_t n,
                              uint16_t *out, struct stk_error *err);

struct hf_job {
    const struct model_config *cfg;
    enum st_dtype dtype;   /* ST_BF16 or ST_F16 */
    bool head_only, both;  /* tied: which names (trainer/source.h) */
    const char *copy_from; /* folder of tokenizer files; NULL: none */
    hf_read_fn *read;
    void *arg;
    void *buf;
    uint64_t buf_bytes;
    struct pulse *pulse;  /* may be NULL */
    uint64_t shard_bytes; /* 0: 5 GB */
};

/* Bytes that the folder will take. */
uint64_t hf_bytes(const struct model_config *cfg, bool both);
/* Writes and checks `partial` (made; what was there is removed). On error it is removed. */
stk_status hf_write(const struct hf_job *job, const char *partial, struct stk_error *err);
/* partial becomes `out`, which must not exist or be empty. */
stk_status hf_publish(const char *partial, const char *out, struct stk_error *err);
/* Files of partial move into `out`, config.json last; an older model there loses its config.json
 * first. */
stk_status hf_publish_into(const char *partial, const char *out, struct stk_error *err);
/* Refuses an `out` that exists and is not an empty folder, or whose parent cannot be written;
 * writes nothing. `option` names it. */
stk_status hf_check_new(const char *option, const char *out, struct stk_error *err);
/* Refuses if `path`, or the nearest folder above it that exists, is not a folder one may write to.
 */
stk_status hf_check_writable(const char *option, const char *path, struct stk_error *err);
/* Bytes free where `path` is or will be, and that file system's device; UINT64_MAX if unknown. */
uint64_t hf_room(const char *path, uint64_t *device);

#endif
