/* formats/model_config_keys.h - the table of the keys of a config.json; for model_config.c and
 * its test. */
#ifndef FORMATS_MODEL_CONFIG_KEYS_H
#define FORMATS_MODEL_CONFIG_KEYS_H

#include "formats/model_config.h"
#include <jansson.h>

/* What a key may hold in a family that does not use it. KEY_ANY: it changes nothing; the others:
 * only the value that changes nothing. */
enum key_neutral { KEY_ANY, KEY_FALSE, KEY_TRUE, KEY_ZERO, KEY_ONE, KEY_EMPTY };

struct model_key {
    const char *name;
    uint32_t used_by; /* bit per family: model_config.c reads it and checks its value */
    enum key_neutral neutral; /* for the other families */
    const char *changes; /* what another value would change; NULL with KEY_ANY */
};

/* NULL: unknown key. */
const struct model_key *model_key_find(const char *name);
/* Refuses unknown keys and keys that would change the mathematics in a way that is not computed
 * here; `where` is the file. */
stk_status model_keys_check(const char *where, json_t *doc, enum model_family family,
                            struct stk_error *err);

#endif
