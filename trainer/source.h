/* trainer/source.h - a Hugging Face model folder as the source of a run: its configuration and its
 * tensors, checked.
 *
 * Names: a tied model's files hold embedding, head or both; what they hold is remembered, because
 * an export has the names of its input (CKP-31, CKP-32). Blocking; application's thread. */
#ifndef TRAINER_SOURCE_H
#define TRAINER_SOURCE_H

#include "formats/model_config.h"

#define NAME_EMBED "model.embed_tokens.weight"
#define NAME_HEAD "lm_head.weight"

struct source {
    const char *folder; /* borrowed */
    struct model_config cfg;
    struct st_set *set; /* NULL: only the configuration was read */
    bool head_only;     /* tied: only lm_head.weight is there */
    bool both;          /* tied: both are there, equal */
    bool have_cfg;
};

/* Reads and checks config.json, and with `tensors` every header against it. Nothing is loaded. */
stk_status source_open(struct source *s, const char *folder, bool tensors, struct stk_error *err);
void source_close(struct source *s);
/* The tensor of the files that holds what the model calls `name`. */
const struct st_tensor *source_find(const struct source *s, const char *name);

#endif
