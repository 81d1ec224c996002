/* tests/nvme/durable_world.h - a durable store with its model: put, commit, close, find, adopt,
 * over one to three paths of any backend. */
#ifndef TESTS_NVME_DURABLE_WORLD_H
#define TESTS_NVME_DURABLE_WORLD_H

#include "tests/nvme/store_world.h"
#include "nvme/store_impl.h"

#include <dirent.h>

enum { N = 9, ROOM_BYTES = 81920, PAYLOAD = 300 };

static const uint64_t sizes[N] = { 1, 511, 4096, 4097, 20000, 65536, 70001, 81920, 12288 };
static const uint8_t classes[N] = { 0, 1, 2, 0, 1, 0, 1, 2, 0 };

/* A store with its model: which version each extent's newest put carried. */
struct dur {
    struct world w;
    struct store_cfg cfg;
    struct store *s;
    char dirs[3][600];
    uint8_t *buf;
    uint64_t newest[N];
    struct stk_error err;
};

static inline uint64_t content(uint32_t extent, uint64_t version)
{
    return extent * 100000 + version;
}

static inline bool dur_world(struct dur *d, enum io_kind io, enum exec_kind ex, uint32_t n_paths)
{
    if (world_open(&d->w, io, ex, test_seed(), &d->err) != STK_OK) return false;
    d->cfg = (struct store_cfg){ .n_extents = N, .extent_bytes = sizes, .extent_class = classes,
                                 .n_paths = n_paths, .room = 2, .payload_max_bytes = PAYLOAD,
                                 .weights = { 2, 1, 1 } };
    for (uint32_t k = 0; k < n_paths; k++) {
        snprintf(d->dirs[k], sizeof d->dirs[k], "%s/p%u", d->w.dir, k);
        d->cfg.paths[k] = d->dirs[k];
        if (!d->w.disk) sys_mkdirs(d->dirs[k]);
    }
    d->buf = sys_mmap(ROOM_BYTES, false);
    for (uint32_t i = 0; i < N; i++) d->newest[i] = UINT64_MAX;
    return d->buf != NULL;
}

static inline void dur_end(struct dur *d)
{
    store_close(d->s);
    sys_munmap(d->buf, ROOM_BYTES);
    world_close(&d->w);
}

static inline stk_status dur_open(struct dur *d)
{
    stk_error_clear(&d->err);
    return store_world_open(&d->w, &d->cfg, &d->s, &d->err);
}

static inline void dur_close(struct dur *d)
{
    store_close(d->s);
    d->s = NULL;
}

static inline stk_status dur_put(struct dur *d, uint32_t i, uint64_t version)
{
    struct store_op op;
    fill(d->buf, sizes[i], content(i, version));
    stk_status status = put_one(&d->w, d->s, i, d->buf, version, &op);
    if (status == STK_OK) d->newest[i] = version;
    return status;
}

static inline void dur_put_all(struct dur *d, uint64_t version)
{
    for (uint32_t i = 0; i < N; i++) CHECK(dur_put(d, i, version + i) == STK_OK);
}

static inline bool dur_holds(struct dur *d, uint32_t i, uint64_t version)
{
    struct store_op op;
    memset(d->buf, 0x77, sizes[i]);
    return store_version(d->s, i) == version &&
           get_one(&d->w, d->s, i, d->buf, version, &op) == STK_OK &&
           filled(d->buf, sizes[i], content(i, version));
}

static inline stk_status dur_commit(struct dur *d, uint64_t step, struct commit_call *call)
{
    uint8_t payload[PAYLOAD];
    fill(payload, step % PAYLOAD, step);
    stk_status status = commit_one(&d->w, d->s, step, payload, step % PAYLOAD, call);
    if (status != STK_OK) stk_error_forward(&d->err, &call->err);
    return status;
}

static inline stk_status dur_find(struct dur *d, const char *run_id, struct store_found **out)
{
    stk_error_clear(&d->err);
    return store_find(d->cfg.paths, d->cfg.n_paths, run_id, d->w.disk, out, &d->err);
}

/* Finds the one durable store, expects this step, and adopts it. */
static inline bool dur_adopt(struct dur *d, uint64_t step)
{
    struct store_found *f;
    uint8_t payload[PAYLOAD];
    uint64_t at;
    stk_status status = dur_find(d, NULL, &f);
    if (status != STK_OK) printf("# %s\n", d->err.text);
    if (status != STK_OK) return false;
    fill(payload, step % PAYLOAD, step);
    bool ok = f->step == step && f->n_extents == N && f->n_paths == d->cfg.n_paths &&
              f->room == d->cfg.room && f->volatile_classes == d->cfg.volatile_classes &&
              memcmp(f->extent_bytes, sizes, sizeof sizes) == 0 &&
              memcmp(f->extent_class, classes, sizeof classes) == 0 &&
              f->payload_bytes == step % PAYLOAD &&
              memcmp(f->payload, payload, f->payload_bytes) == 0;
    uint64_t need = 0;
    for (uint32_t k = 0; k < d->cfg.n_paths; k++) need += store_need_bytes(&d->cfg, k);
    ok = ok && f->size_bytes == need;
    memcpy(d->cfg.run_id, f->run_id, sizeof d->cfg.run_id);
    store_found_free(f);
    d->cfg.adopt = true;
    status = dur_open(d);
    d->cfg.adopt = false;
    memset(d->cfg.run_id, 0, sizeof d->cfg.run_id);
    if (status != STK_OK) printf("# %s\n", d->err.text);
    return ok && status == STK_OK && store_durable(d->s, &at) && at == step;
}

static inline uint32_t entries_in(const char *dir)
{
    uint32_t n = 0;
    DIR *dp = opendir(dir);
    struct dirent *e;
    while (dp && (e = readdir(dp))) n += e->d_name[0] != '.';
    if (dp) closedir(dp);
    return n;
}

/* Nothing of any run is left on any path. */
static inline bool nothing_left(const struct dur *d)
{
    if (d->w.disk) return io_sim_free_bytes(d->w.disk) == 1ull << 40;
    for (uint32_t k = 0; k < d->cfg.n_paths; k++)
        if (entries_in(d->dirs[k]) != 0) return false;
    return true;
}

/* Committed on three paths, closed; the run's id goes to `id`. */
static inline bool committed(struct dur *d, enum io_kind io, uint32_t n_paths,
                             char id[STORE_RUN_ID_MAX])
{
    struct commit_call call;
    if (!dur_world(d, io, EXEC_SIM, n_paths) || dur_open(d) != STK_OK) return false;
    dur_put_all(d, 10);
    if (dur_commit(d, 1, &call) != STK_OK) return false;
    dur_put_all(d, 20);
    if (dur_commit(d, 2, &call) != STK_OK) return false;
    memcpy(id, d->s->run_id, STORE_RUN_ID_MAX);
    dur_close(d);
    return true;
}

/* --- tables as bytes ------------------------------------------------------------------------ */

static inline void table_name(const struct dur *d, uint32_t path, const char *id, char *out,
                              size_t n)
{
    snprintf(out, n, "%s/stoker-run-%s/table.bin", d->dirs[path], id);
}

static inline void table_read(struct dur *d, uint32_t path, const char *id, uint8_t *buf,
                              uint64_t n)
{
    char name[2048];
    table_name(d, path, id, name, sizeof name);
    CHECK(store_file_read(d->w.disk, name, buf, n, 0) == (int64_t)n);
}

static inline void table_write(struct dur *d, uint32_t path, const char *id, const uint8_t *buf,
                        uint64_t n)
{
    char name[2048];
    table_name(d, path, id, name, sizeof name);
    CHECK(store_file_write(d->w.disk, name, buf, n, 0) == 0);
}

static inline uint64_t found_step(struct dur *d)
{
    struct store_found *f;
    if (dur_find(d, NULL, &f) != STK_OK) return 0;
    uint64_t step = f->step;
    store_found_free(f);
    return step;
}

#endif
