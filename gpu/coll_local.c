/* gpu/coll_local.c - collectives of one rank: each is a copy or nothing.
 *
 * Owns the refusal of more ranks (their backends are other files behind coll.h). Must not know
 * tiers or plans. Never blocks. */
#include "gpu/coll.h"

#include "base/sys.h"
#include <stdlib.h>
#include <string.h>

struct coll {
    uint32_t rank, size;
};

static uint64_t coll_bytes(enum coll_dtype t)
{
    switch (t) {
    case COLL_BYTES: return 1;
    case COLL_BF16: return 2;
    case COLL_F32: return 4;
    case COLL_F64:
    case COLL_U64: return 8;
    }
    STK_ASSERT(!"a collective's type");
    return 0;
}

/* An environment variable as a number; unset or empty: `otherwise`. */
static stk_status coll_env(const char *name, unsigned long otherwise, unsigned long *out,
                           struct stk_error *err)
{
    const char *text = getenv(name);
    char *end = NULL;
    *out = otherwise;
    if (!text || !*text) return STK_OK;
    *out = strtoul(text, &end, 10);
    if (*end || *text == '-' || *out > UINT32_MAX)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "environment variable %s is \"%s\", expected a number of a rank or of ranks", name,
            text);
    return STK_OK;
}

stk_status coll_open(struct coll **out, struct stk_error *err)
{
    unsigned long size, rank;
    *out = NULL;
    STK_TRY(coll_env("WORLD_SIZE", 1, &size, err));
    STK_TRY(coll_env("RANK", 0, &rank, err));
    if (size > 1)
        return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                             "WORLD_SIZE is %lu, but this build has collectives for one rank only; "
                             "unset WORLD_SIZE and RANK or "
                             "start a single process",
                             size);
    if (size == 0 || rank >= size)
        return stk_error_set(
            err, STK_ERR_CONFIG, 0,
            "RANK is %lu and WORLD_SIZE is %lu: a rank must be below the number of ranks", rank,
            size);
    struct coll *c = sys_calloc(1, sizeof *c);
    if (!c) return stk_error_set(err, STK_ERR_NOMEM, 0, "collectives: no memory for their record");
    c->size = 1;
    *out = c;
    return STK_OK;
}

void coll_close(struct coll *c) { sys_free(c); }
uint32_t coll_rank(const struct coll *c) { return c->rank; }
uint32_t coll_size(const struct coll *c) { return c->size; }

static stk_status coll_copy(const void *send, void *recv, uint64_t count, enum coll_dtype t)
{
    if (send != recv && count) memmove(recv, send, count * coll_bytes(t));
    return STK_OK;
}

stk_status coll_all_gather(struct coll *c, const void *send, void *recv, const uint64_t *counts,
                           enum coll_dtype t, uint64_t deadline_ns, struct stk_error *err)
{
    (void)c;
    (void)deadline_ns;
    (void)err;
    return coll_copy(send, recv, counts[0], t);
}

stk_status coll_reduce_scatter(struct coll *c, const void *send, void *recv, const uint64_t *counts,
                               enum coll_dtype t, uint64_t deadline_ns, struct stk_error *err)
{
    (void)c;
    (void)deadline_ns;
    (void)err;
    return coll_copy(send, recv, counts[0], t);
}

stk_status coll_all_reduce(struct coll *c, void *buf, uint64_t count, enum coll_dtype t,
                           uint64_t deadline_ns, struct stk_error *err)
{
    (void)c;
    (void)buf;
    (void)count;
    (void)t;
    (void)deadline_ns;
    (void)err;
    return STK_OK;
}

stk_status coll_broadcast(struct coll *c, void *buf, uint64_t size_bytes, uint32_t root,
                          uint64_t deadline_ns, struct stk_error *err)
{
    (void)buf;
    (void)size_bytes;
    (void)deadline_ns;
    if (root < c->size) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, 0, "broadcast: root %u is not one of %u ranks", root,
                         c->size);
}

stk_status coll_barrier(struct coll *c, uint64_t deadline_ns, struct stk_error *err)
{
    (void)c;
    (void)deadline_ns;
    (void)err;
    return STK_OK;
}
