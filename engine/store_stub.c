/* engine/store_stub.c - stands in for what nvme/store.c does not have yet (goes when it has). */
#include "nvme/store.h"
#define WEAK __attribute__((weak))
WEAK void store_discard(struct store *s) {}
WEAK stk_status store_find(const char *const *paths, uint32_t n_paths, const char *run_id,
                           struct io_sim_disk *disk, struct store_found **out, struct stk_error *err)
{
    *out = NULL;
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0, "durable steps are not built yet");
}
WEAK void store_found_free(struct store_found *f) {}
WEAK stk_status store_commit_submit(struct store *s, struct store_commit *c, struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0, "durable steps are not built yet");
}
