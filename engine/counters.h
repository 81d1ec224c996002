/* engine/counters.h - the document that a checkpoint (checkpoint.c) and a durable step (durable.c)
 * carry beside the tensors. Application's thread, between steps. */
#ifndef ENGINE_COUNTERS_H
#define ENGINE_COUNTERS_H

#include "engine/engine.h"
#include "formats/manifest.h"

/* The state of the counters now (a pending update counts as run); NULL: no memory. json_decref. */
json_t *counters_document(stk_engine *e, const char *client_json);
/* `call` names the refused call: one JSON object, or NULL. */
stk_status counters_check_client(stk_engine *e, const char *call, const char *client_json);
/* The document must be of this model and of this arithmetic; the first difference is named. `path`
 * begins the sentence. */
stk_status counters_agree_model(stk_engine *e, const char *path, const json_t *doc);
/* Moments as they are kept here; any: or of another kind that can be converted. */
stk_status counters_agree_moments(stk_engine *e, const char *path, const json_t *doc, bool any);
stk_status counters_agree(stk_engine *e, const char *path, const json_t *doc, bool any_numerics);
void counters_take(stk_engine *e, const json_t *doc);
/* The client's object as text; sys_free; NULL: no memory. */
char *counters_client(const json_t *doc);

#endif
