/* engine/twin.c - blocks that lie in the device's memory: which, how many bytes, where (engine/twin.h).
 *
 * Application's thread: inside stk_seal, and between steps for what moves. Owns the spans of updates in
 * flight. Must not know how an update is issued (twin_run.c), nor how a placement is searched (place.c). */
#include "engine/twin.h"
#include "base/sys.h"
#include "offload/adam_device.h"
#include <string.h>

/* --- which ------------------------------------------------------------------------------------- */

/* Why none can be there; NULL: some can. */
static const char *obstacle(const stk_engine *e, const struct eng_placement *pl)
{
    if (e->caps.host_in_place) return "this device computes in host memory: it has none of its own";
    if (e->cfg.own_order) return "the client keeps its own order";
    if (e->cfg.moments != STK_MOMENTS_F32) return "moments in fewer bits (--moments) are updated on the host only";
    if (!place_trains(e)) return "nothing is trained";
    if (pl->param != CHUNK_HOST || pl->opt != CHUNK_HOST || pl->grad != CHUNK_HOST)
        return "state lies on NVMe, and is updated on the host then";
    return NULL;
}

static uint64_t trainable(const stk_engine *e)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++) sum += e->layout->blocks[i].elems_trainable;
    return sum;
}

uint64_t twin_asked(const stk_engine *e)
{
    double f = e->cfg.optimizer_on_device;
    if (!(f > 0)) return 0;
    return f >= 1 ? UINT64_MAX : (uint64_t)(f * (double)trainable(e) + 0.5);
}

/* Where the "device" is this machine's own cores and memory, nothing is gained by moving there. */
bool twin_auto(const stk_engine *e, const struct eng_placement *pl)
{
    bool other = e->caps.kind == DEV_CUDA || (e->cfg.machine && !e->cfg.machine->on_host);
    return e->cfg.optimizer_on_device == STK_ON_DEVICE_AUTO && other && !obstacle(e, pl);
}

static uint64_t block_bytes(const stk_engine *e, const struct stk_block *b)
{
    uint64_t sum[CHUNK_STATE_N] = { 0 };
    for (uint32_t i = b->first_chunk; i < b->first_chunk + b->n_chunks; i++)
        for (int s = CHUNK_OPT; s <= CHUNK_GRAD; s++)
            sum[s] += chunk_bytes(e->layout, &e->layout->chunks[i], (enum chunk_state)s);
    return round_page(2 * b->elems) + round_page(sum[CHUNK_OPT]) + round_page(sum[CHUNK_GRAD]);
}

void twin_homes(const stk_engine *e, const struct eng_placement *pl)
{
    uint64_t elems = pl->twin_elems, room = pl->twin_room;
    if (elems == 0 || obstacle(e, pl)) return;
    for (uint32_t i = 0; i < e->n_use_blocks; i++) {
        const struct stk_block *b = &e->layout->blocks[e->use_blocks[i]];
        uint64_t bytes = block_bytes(e, b);
        if (b->elems_trainable == 0 || b->elems_trainable > elems || bytes > room) continue;
        if (elems != UINT64_MAX) elems -= b->elems_trainable;
        if (room != UINT64_MAX) room -= bytes;
        for (uint32_t k = b->first_chunk; k < b->first_chunk + b->n_chunks; k++)
            for (int s = 0; s < CHUNK_STATE_N; s++)
                if (e->pchunks[k].bytes[s]) e->pchunks[k].home[s] = CHUNK_DEVICE;
    }
}

static bool there(const stk_engine *e, const struct stk_block *b)
{
    return b->n_chunks > 0 && e->pchunks[b->first_chunk].home[CHUNK_PARAM] == CHUNK_DEVICE;
}

static uint64_t state_bytes(const stk_engine *e, const struct stk_block *b, enum chunk_state s)
{
    uint64_t sum = 0;
    if (!there(e, b)) return 0;
    if (s == CHUNK_PARAM) return round_page(2 * b->elems);
    for (uint32_t i = b->first_chunk; i < b->first_chunk + b->n_chunks; i++)
        sum += e->pchunks[i].bytes[s];
    return round_page(sum);
}

uint64_t twin_bytes(const stk_engine *e, enum chunk_state s)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++) sum += state_bytes(e, &e->layout->blocks[i], s);
    return sum;
}

uint64_t twin_total(const stk_engine *e)
{
    return twin_bytes(e, CHUNK_PARAM) + twin_bytes(e, CHUNK_OPT) + twin_bytes(e, CHUNK_GRAD);
}

uint32_t twin_blocks(const stk_engine *e)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++) n += there(e, &e->layout->blocks[i]);
    return n;
}

static uint64_t elems_there(const stk_engine *e)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->layout->n_blocks; i++)
        if (there(e, &e->layout->blocks[i])) sum += e->layout->blocks[i].elems_trainable;
    return sum;
}

/* --- what is said ------------------------------------------------------------------------------ */

stk_status twin_refuse(stk_engine *e, const struct eng_placement *pl, uint64_t device_limit)
{
    struct eng_placement less = *pl;
    char a[32], b[32], c[32];
    place_fill(e, pl);
    uint64_t mine = twin_total(e), others = pl->device_bytes - mine;
    uint32_t blocks = twin_blocks(e);
    less.twin_elems = UINT64_MAX;
    less.twin_room = device_limit > others ? device_limit - others : 0;
    place_fill(e, &less);
    double most = (double)elems_there(e) / (double)trainable(e);
    most = (double)(uint64_t)(most * 1000) / 1000; /* downwards */
    return stk_error_set(&e->err, STK_ERR_NOMEM, 0,
                         "--optimizer-on-device %g: the state of %u blocks takes %s of the device's memory "
                         "beside %s for everything else, and it has %s: give at most %.3f, auto, or a larger "
                         "--device-memory",
                         e->cfg.optimizer_on_device, blocks, mem_size_format(mine, a),
                         mem_size_format(others, b), mem_size_format(device_limit, c), most);
}

void twin_note(stk_engine *e, const struct eng_placement *pl)
{
    double f = e->cfg.optimizer_on_device;
    const char *why = obstacle(e, pl);
    uint32_t n = twin_blocks(e);
    char a[32];
    if (n > 0)
        eng_note(e, "optimizer state on the device: %u of %u blocks (%.1f %% of the trainable parameters, %s "
                    "with parameters and gradients), updated there",
                 n, e->layout->n_blocks, 100.0 * (double)elems_there(e) / (double)trainable(e),
                 mem_size_format(twin_total(e), a));
    else if (f > 0)
        eng_note(e, "--optimizer-on-device %g: no optimizer state on the device: %s", f,
                 why ? why : "no block is that small");
}

/* --- memory ------------------------------------------------------------------------------------ */

stk_status twin_lay(stk_engine *e, void *base)
{
    uint8_t *at = base;
    uint64_t total = twin_total(e);
    if (total == 0) return STK_OK;
    for (int s = 0; s < CHUNK_STATE_N; s++)
        for (uint32_t i = 0; i < e->layout->n_blocks; i++) {
            const struct stk_block *b = &e->layout->blocks[i];
            uint64_t sum = 0;
            if (!there(e, b)) continue;
            for (uint32_t k = b->first_chunk; k < b->first_chunk + b->n_chunks; k++) {
                struct stk_chunk *c = &e->layout->chunks[k];
                if (e->pchunks[k].bytes[s] == 0) continue;
                c->device[s] = at + (s == CHUNK_PARAM ? 2 * c->first_elem : sum);
                sum += e->pchunks[k].bytes[s];
            }
            at += state_bytes(e, b, (enum chunk_state)s);
        }
    STK_ASSERT(at == (uint8_t *)base + total);
    /* padding between tensors must be zeros: the update walks over it */
    STK_TRY(dev_zero(e->compute, base, total, &e->err));
    return dev_sync(e->compute, &e->err);
}

stk_status twin_alloc(stk_engine *e)
{
    struct eng_twin *t = &e->twin;
    for (uint32_t i = 0; i < e->layout->n_chunks; i++) {
        const struct stk_chunk *c = &e->layout->chunks[i];
        if (c->home[CHUNK_OPT] != CHUNK_DEVICE) continue;
        uint32_t n = adam_device_spans_max(e->layout, c);
        t->any = true;
        if (n > t->spans_max) t->spans_max = n;
    }
    if (!t->any) return STK_OK;
    t->spans = sys_calloc((size_t)t->spans_max * TWIN_IN_FLIGHT + 1, sizeof *t->spans);
    return t->spans ? STK_OK
                    : stk_error_set(&e->err, STK_ERR_NOMEM, 0, "no memory for updates on the device");
}

void twin_free(stk_engine *e)
{
    sys_free(e->twin.spans);
    e->twin.spans = NULL;
}

stk_status twin_move(stk_engine *e, const struct stk_chunk *c, uint32_t states, bool put,
                     void *const buf[CHUNK_STATE_N])
{
    stk_status st = STK_OK;
    for (int s = 0; s < CHUNK_STATE_N && st == STK_OK; s++) {
        if (!(states & 1u << s)) continue;
        void *dst = put ? c->device[s] : buf[s], *src = put ? buf[s] : c->device[s];
        st = dev_copy(e->compute, dst, src, chunk_bytes(e->layout, c, (enum chunk_state)s),
                      put ? DEV_TO_DEVICE : DEV_TO_HOST, &e->err);
    }
    if (states && st == STK_OK) st = dev_sync(e->compute, &e->err);
    if (st != STK_OK) e->state = ENG_FAILED;
    return st;
}
