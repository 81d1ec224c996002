/* tests/nvme/test_store_place.c - which path each extent goes to: shares, limits, sharing a file
 * system; what is announced against what is made; and the rate of several drives together, on the
 * simulated disk. */
#include "tests/nvme/store_world.h"
#include "nvme/store_impl.h"

#include <sys/stat.h>

enum { N = 600, KIB = 1024, MIB_BYTES = 1024 * 1024 };

static uint64_t sizes[N];
static uint8_t classes[N];

static struct store_cfg cfg_of(uint32_t n_paths, uint64_t bytes)
{
    struct store_cfg cfg = { .n_extents = N, .extent_bytes = sizes, .n_paths = n_paths, .room = 1 };
    for (uint32_t i = 0; i < N; i++) {
        sizes[i] = bytes;
        classes[i] = (uint8_t)(i % 3);
    }
    for (uint32_t k = 0; k < n_paths; k++) cfg.paths[k] = "somewhere";
    return cfg;
}

/* Any run of neighbours of a class is shared out by weight, within one extent per path. */
static void check_neighbours(const struct store_cfg *cfg, const struct store_extent *e,
                             const double *share, uint32_t cls)
{
    for (uint32_t from = 0; from < N; from += 7) {
        uint32_t count[STORE_PATHS_MAX] = { 0 }, n = 0;
        for (uint32_t i = from; i < N && n < 100; i++) {
            if (store_extent_class(cfg, i) != cls) continue;
            count[e[i].path]++;
            n++;
        }
        for (uint32_t k = 0; k < cfg->n_paths; k++) {
            double want = share[k] * n;
            CHECK(count[k] >= want - cfg->n_paths && count[k] <= want + cfg->n_paths);
        }
    }
}

TEST(store_place_shares_by_weight)
{
    static const double weights[][4] = {
        { 3, 1 }, { 5, 2, 1 }, { 1, 1, 1, 1 }, { 2.5, 0, 1.5, 4 }
    };
    static const uint32_t n_paths[] = { 2, 3, 4, 4 };
    struct store_extent *e = calloc(N, sizeof *e);
    for (int c = 0; c < 4; c++) {
        struct store_cfg cfg = cfg_of(n_paths[c], 100 * KIB);
        uint64_t bytes[STORE_PATHS_MAX], at[STORE_PATHS_MAX] = { 0 };
        double sum = 0, share[4];
        cfg.extent_class = classes;
        for (uint32_t k = 0; k < cfg.n_paths; k++) sum += cfg.weights[k] = weights[c][k];
        for (uint32_t k = 0; k < 4; k++) share[k] = weights[c][k] / sum;
        struct stk_error err = { 0 };
        CHECK_OK(store_place(&cfg, NULL, e, bytes, &err), &err);
        for (uint32_t cls = 0; cls < 3; cls++) check_neighbours(&cfg, e, share, cls);
        for (uint32_t i = 0; i < N; i++) { /* in order, without holes */
            CHECK(e[i].offset_bytes == at[e[i].path]);
            at[e[i].path] += store_round(sizes[i]);
        }
        for (uint32_t k = 0; k < cfg.n_paths; k++)
            CHECK(bytes[k] == at[k] && store_need_bytes(&cfg, k) == bytes[k] &&
                  (weights[c][k] > 0 || bytes[k] == 0));
    }
    free(e);
}

/* A limit is never passed; what a short path cannot hold is spread over the others along the whole
 * class. */
TEST(store_place_limits)
{
    struct store_extent *e = calloc(N, sizeof *e);
    uint64_t bytes[STORE_PATHS_MAX], each = 100 * KIB, room = store_round(each);
    struct store_cfg cfg = cfg_of(3, each);
    struct stk_error err = { 0 };
    cfg.limits[1] = 60 * room + 17; /* a tenth instead of a third */
    CHECK_OK(store_place(&cfg, NULL, e, bytes, &err), &err);
    CHECK(bytes[1] <= cfg.limits[1] && bytes[1] >= 59 * room);
    CHECK(bytes[0] + bytes[1] + bytes[2] == N * room);
    CHECK(bytes[0] < 271 * room && bytes[2] < 271 * room);
    static const double share[] = { 0.45, 0.1, 0.45 };
    check_neighbours(&cfg, e, share, 0);
    /* what fits exactly is accepted; a byte less is refused with the numbers */
    for (int k = 0; k < 3; k++) cfg.limits[k] = 200 * room;
    CHECK_OK(store_place(&cfg, NULL, e, bytes, &err), &err);
    CHECK(bytes[0] == 200 * room && bytes[1] == 200 * room && bytes[2] == 200 * room);
    cfg.limits[2]--;
    CHECK(store_place(&cfg, NULL, e, bytes, &err) == STK_ERR_NOSPACE);
    CHECK(strstr(err.text, "61440000 bytes") && strstr(err.text, "20479999"));
    printf("# %s\n", err.text);
    CHECK(store_need_bytes(&cfg, 2) == 200 * room); /* what would be needed */
    /* tables count */
    cfg.limits[2]++;
    cfg.room = 2;
    cfg.payload_max_bytes = 1;
    for (int k = 0; k < 3; k++) cfg.limits[k] = 400 * room + 2 * store_half_bytes(&cfg);
    stk_error_clear(&err);
    CHECK_OK(store_place(&cfg, NULL, e, bytes, &err), &err);
    CHECK(store_need_bytes(&cfg, 0) == cfg.limits[0]);
    cfg.limits[0]--;
    CHECK(store_place(&cfg, NULL, e, bytes, &err) == STK_ERR_NOSPACE);
    free(e);
}

/* Paths of one file system share what is free there. */
TEST(store_place_shared_file_system)
{
    uint64_t bytes[STORE_PATHS_MAX], each = 100 * KIB, room = store_round(each);
    struct store_cfg cfg = cfg_of(3, each);
    struct store_free have = { .group = { 0, 1, 0 }, .bytes = { 200 * room, UINT64_MAX } };
    struct stk_error err = { 0 };
    CHECK_OK(store_place(&cfg, &have, NULL, bytes, &err), &err);
    CHECK(bytes[0] + bytes[2] <= 200 * room && bytes[0] + bytes[2] >= 198 * room);
    CHECK(bytes[0] <= 101 * room && bytes[2] <= 101 * room && bytes[1] >= 400 * room);
    have.bytes[1] = 399 * room;
    CHECK(store_place(&cfg, &have, NULL, bytes, &err) == STK_ERR_NOSPACE);
}

/* Random: whatever is accepted keeps every limit and places each byte once; whatever is refused had
 * no more than a few extents' room to spare. */
TEST(store_place_random)
{
    struct rng r;
    struct store_extent *e = calloc(N, sizeof *e);
    uint32_t fits = 0, refused = 0;
    for (uint64_t seed = 0; seed < 300; seed++) {
        uint64_t bytes[STORE_PATHS_MAX], total = 0, room = 0, most = 0;
        rng_seed(&r, test_seed() + seed);
        struct store_cfg cfg = cfg_of(1 + (uint32_t)rng_below(&r, 8), 1);
        cfg.extent_class = classes;
        cfg.volatile_classes = 2;
        cfg.room = 1 + (uint32_t)rng_below(&r, 3);
        for (uint32_t i = 0; i < N; i++) {
            sizes[i] = 1 + rng_below(&r, 300 * KIB);
            uint64_t b = store_round(sizes[i]) * store_extent_room(&cfg, i);
            total += b;
            if (b > most) most = b;
        }
        for (uint32_t k = 0; k < cfg.n_paths; k++) {
            cfg.weights[k] = 0.1 + rng_uniform(&r) * 4;
            cfg.limits[k] = 1 + (uint64_t)((double)total / cfg.n_paths * 2.2 * rng_uniform(&r));
            room += cfg.limits[k];
        }
        stk_status status = store_place(&cfg, NULL, e, bytes, NULL);
        if (status == STK_OK) fits++;
        else refused++;
        if (status != STK_OK) CHECK(room < total + cfg.n_paths * most);
        for (uint32_t k = 0; status == STK_OK && k < cfg.n_paths; k++)
            CHECK(bytes[k] <= cfg.limits[k]);
    }
    CHECK(fits > 50 && refused > 50);
    free(e);
}

/* NVM-02, NVM-05: what is announced is what is made, on every path, and it is gone afterwards. */
TEST(store_nvm_02_announced_is_made)
{
    struct world w = { 0 };
    struct stk_error err = { 0 };
    struct store *s;
    char dirs[3][600];
    const char *file;
    CHECK_OK(world_open(&w, IO_POSIX, EXEC_SIM, 1, &err), &err);
    struct store_cfg cfg = cfg_of(3, 20000);
    for (uint32_t k = 0; k < 3; k++) {
        snprintf(dirs[k], sizeof dirs[k], "%s/%c", w.dir, 'a' + (char)k);
        sys_mkdirs(dirs[k]);
        cfg.paths[k] = dirs[k];
        cfg.weights[k] = k + 1;
    }
    cfg.n_extents = 50;
    cfg.room = 2;
    cfg.payload_max_bytes = 10000;
    cfg.no_checksums = true; /* no lanes: only the store's own memory */
    memcpy(cfg.run_id, "0123456789abcdef", 17);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    store_close(s); /* the io keeps a drive once it is opened */
    uint64_t before = sys_alloc_bytes(), of_io = 0;
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    for (uint32_t k = 0; k < 3; k++) {
        struct stat st;
        char name[2048];
        uint64_t made = 0;
        snprintf(name, sizeof name, "%s/stoker-run-0123456789abcdef/extents-%u.bin", dirs[k], k);
        CHECK(stat(name, &st) == 0 && st.st_blocks * 512 >= st.st_size);
        made += (uint64_t)st.st_size;
        of_io += strlen(name) + 1;
        snprintf(name, sizeof name, "%s/stoker-run-0123456789abcdef/table.bin", dirs[k]);
        CHECK(stat(name, &st) == 0 && st.st_blocks * 512 >= st.st_size);
        made += (uint64_t)st.st_size;
        of_io += strlen(name) + 1;
        CHECK(made == store_need_bytes(&cfg, k));
    }
    CHECK(sys_alloc_bytes() - before - of_io + store_half_bytes(&cfg) == store_memory_bytes(&cfg));
    CHECK(store_locate(s, 0, &file, &before) == STK_OK);
    store_close(s);
    for (uint32_t k = 0; k < 3; k++) CHECK(rmdir(dirs[k]) == 0);
    world_close(&w);
}

/* --- several drives together ------------------------------------------------------------------ */

struct stream {
    struct store *s;
    struct store_op *ops;
    uint8_t *buf;
    uint64_t room;
    uint32_t n, next, done, depth;
    bool put;
};

static void stream_more(struct stream *m);

static void stream_done(struct store_op *op)
{
    struct stream *m = op->owner;
    CHECK(op->status == STK_OK);
    m->done++;
    stream_more(m);
}

static void stream_more(struct stream *m)
{
    struct stk_error err = { 0 };
    for (; m->next < m->n && m->next - m->done < m->depth; m->next++) {
        struct store_op *op = &m->ops[m->next];
        *op = (struct store_op){ .extent = m->next, .buf = m->buf + (m->next % m->depth) * m->room,
                                 .version = 1, .done = stream_done, .owner = m };
        CHECK((m->put ? store_put(m->s, op, &err) : store_get(m->s, op, &err)) == STK_OK);
    }
}

static void stream_start(void *arg) { stream_more(arg); }

/* Bytes per second of virtual time. */
static double stream_rate(struct world *w, struct stream *m, bool put)
{
    struct stk_error err = { 0 };
    uint64_t begin = exec_now_ns(w->ex);
    m->put = put;
    m->next = m->done = 0;
    world_run(w, stream_start, m);
    CHECK(store_drain(m->s, UINT64_MAX, &err) == STK_OK && m->done == m->n);
    return (double)m->n * (double)m->room / (double)(exec_now_ns(w->ex) - begin) * 1e9;
}

/* Of drives with these rates a class streams at no less than 0.95 of their sum, reading and
 * writing; `limited`: path 0 holds only half of its share, and the rest still do all they can. */
static void rate_of(const double *rates, uint32_t n_paths, bool limited)
{
    enum { EACH = MIB_BYTES, COUNT = 400, DEPTH = 32 };
    struct world w = { .cfg = { .depth = 16 } };
    struct stk_error err = { 0 };
    struct store *s;
    static uint64_t bytes[COUNT];
    char names[4][16];
    struct store_cfg cfg = { .n_extents = COUNT, .extent_bytes = bytes, .n_paths = n_paths,
                             .no_checksums = true };
    double sum = 0, possible = 0;
    for (int i = 0; i < COUNT; i++) bytes[i] = EACH;
    w.sim.latency_ns = 80000;
    for (uint32_t k = 0; k < n_paths; k++) {
        snprintf(names[k], sizeof names[k], "/drive%u", k);
        cfg.paths[k] = names[k];
        w.sim.drives[k] = (struct io_sim_drive){ rates[k], rates[k] / 2 };
        sum += cfg.weights[k] = rates[k];
    }
    possible = sum;
    if (limited) {
        double share = rates[0] / sum / 2;
        cfg.limits[0] = (uint64_t)(share * COUNT) * EACH;
        /* path 0 works as long as the others: it can be busy only for a part of the time */
        possible = (sum - rates[0]) / (1 - (double)cfg.limits[0] / EACH / COUNT);
    }
    CHECK_OK(world_open(&w, IO_SIM, EXEC_SIM, 1, &err), &err);
    CHECK_OK(store_world_open(&w, &cfg, &s, &err), &err);
    struct stream m = { .s = s, .n = COUNT, .depth = DEPTH, .room = EACH };
    m.ops = calloc(COUNT, sizeof *m.ops);
    m.buf = sys_mmap(DEPTH * EACH, false);
    double put = stream_rate(&w, &m, true) * 2, get = stream_rate(&w, &m, false);
    printf("# %u drives%s: reads %.3f, writes %.3f of %.2f GB/s\n", n_paths,
           limited ? ", one short of room" : "", get / possible, put / possible, possible / 1e9);
    CHECK(put >= 0.95 * possible && get >= 0.95 * possible);
    for (uint32_t k = 0; k < n_paths; k++) {
        struct store_path_stats st;
        store_path_stats_read(s, k, &st);
        CHECK(st.extents_bytes == store_need_bytes(&cfg, k) && st.read_bytes == st.extents_bytes &&
              st.write_bytes == st.extents_bytes);
    }
    free(m.ops);
    sys_munmap(m.buf, DEPTH * EACH);
    store_close(s);
    world_close(&w);
}

TEST(store_several_drives_reach_their_sum)
{
    static const double two[] = { 3e9, 1e9 }, three[] = { 3.2e9, 2.1e9, 0.9e9 },
                        four[] = { 7e9, 3.5e9, 2e9, 1.1e9 };
    for (int limited = 0; limited < 2; limited++) {
        rate_of(two, 2, limited);
        rate_of(three, 3, limited);
        rate_of(four, 4, limited);
    }
}

TEST_MAIN()
