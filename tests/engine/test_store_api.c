/* tests/engine/test_store_api.c - the extent store alone (stk_store_*): round trips, order of
 * calls, buffers at the minimum, errors, faults by seed. Durable steps: test_store_durable.c. */
#include "tests/engine/swap_world.h"
#include "engine/store_api.h"

#include <fcntl.h>
#include <sched.h>

/* --- round trips ------------------------------------------------------------------------------ */

static const uint64_t odd_sizes[] = { 1,      511,     512,     513,     4095,     4096,    4097,
                                      8191,   8192,    8193,    65535,   65536,    65537,   1048575,
                                      1048576, 1048577, 28824000, 28823999, 28824001 };
enum { N_ODD = sizeof odd_sizes / sizeof *odd_sizes };

/* What lies beside the caller's bytes stays as it was. */
static bool get_guarded(struct swap_world *w, uint32_t item, uint64_t gen, bool aligned)
{
    uint64_t n = w->c.item_bytes[item];
    uint8_t *at = w->work + (aligned ? 4096 : 4097);
    memset(at - 8, 0xa5, 8);
    memset(at + n, 0xa5, 8);
    if (stk_store_get(w->s, item, at) != STK_OK) {
        printf("# item %u: %s\n", item, stk_store_error(w->s));
        return false;
    }
    for (int i = 1; i <= 8; i++)
        if (at[-i] != 0xa5 || at[n + (uint64_t)i - 1] != 0xa5) return false;
    return content_is(at, n, item, gen);
}

TEST(store_api_nvm_01_sizes_come_back_byte_for_byte)
{
    FOR_KINDS(k)
    {
        /* the largest only on the simulated disk and on the drive */
        uint32_t n = k == swap_kinds || k == swap_kinds + N_KINDS - 1 ? N_ODD : N_ODD - 3;
        struct swap_world w;
        swap_world_init(&w, k, odd_sizes, n);
        OPEN(&w);
        for (uint64_t gen = 1; gen <= 2; gen++) {
            for (uint32_t i = 0; i < n; i++) PUT(&w, i, gen);
            for (uint32_t i = 0; i < n; i++) CHECK(get_guarded(&w, i, gen, (i + gen) % 2));
        }
        OK(&w, stk_store_flush(w.s));
        for (uint32_t i = n; i-- > 0;) CHECK(get_guarded(&w, i, 2, i % 2));
        stk_store_stats t;
        stk_store_stats_read(w.s, &t);
        CHECK(t.hits + t.misses == 3 * n && t.misses > 0 && t.hits > 0);
        swap_world_close(&w);
    }
}

/* Item sizes +-1 around the block sizes, in a buffer of each size. */
TEST(store_api_nvm_01_every_size_around_a_block)
{
    uint64_t sizes[64];
    uint32_t n = 0;
    for (uint64_t block = 512; block <= 131072; block *= 2)
        for (uint64_t d = 0; d < 3; d++) sizes[n++] = block + d - 1;
    FOR_KINDS(k)
    {
        for (uint32_t i = 0; i < n; i++) {
            struct swap_world w;
            swap_world_init(&w, k, &sizes[i], 1);
            OPEN(&w);
            PUT(&w, 0, 7);
            CHECK(get_guarded(&w, 0, 7, true));
            swap_drop(w.s, (stk_store_flush(w.s), swap_find(w.s, 0)));
            CHECK(get_guarded(&w, 0, 7, i % 2));
            swap_world_close(&w);
        }
    }
}

/* --- order of calls, refusals ----------------------------------------------------------------- */

#define SAYS(s_, word) CHECK(strstr(stk_store_error(s_), word) != NULL)

TEST(store_api_nvm_11_no_order_of_calls_crashes)
{
    uint8_t data[100] = { 0 };
    uint64_t step, bytes;
    const void *payload;
    stk_store_stats t;
    CHECK(stk_store_put(NULL, 0, data) == STK_ERR_STATE);
    CHECK(stk_store_get(NULL, 0, data) == STK_ERR_STATE);
    CHECK(stk_store_prefetch(NULL, 0) == STK_ERR_STATE);
    CHECK(stk_store_flush(NULL) == STK_ERR_STATE);
    CHECK(stk_store_commit(NULL, 1, NULL, 0) == STK_ERR_STATE);
    CHECK(stk_store_durable(NULL, &step, &payload, &bytes) == STK_END);
    stk_store_stats_read(NULL, &t);
    CHECK(t.hits == 0 && strcmp(stk_store_error(NULL), "") == 0);
    CHECK(strcmp(stk_store_describe(NULL), "") == 0);
    stk_store_close(NULL, true);
    CHECK(stk_store_open(NULL, NULL) == STK_ERR_CONFIG);
    stk_store *s;
    CHECK(stk_store_open(NULL, &s) == STK_ERR_CONFIG);
    SAYS(s, "stk_store_config_init");
    CHECK(stk_store_put(s, 0, data) == STK_ERR_STATE); /* not opened */
    SAYS(s, "stk_store_config_init");
    CHECK(stk_store_get(s, 0, data) == STK_ERR_STATE && stk_store_prefetch(s, 0) == STK_ERR_STATE);
    CHECK(stk_store_flush(s) == STK_ERR_STATE && stk_store_commit(s, 1, 0, 0) == STK_ERR_STATE);
    CHECK(stk_store_durable(s, &step, &payload, &bytes) == STK_END);
    CHECK(strcmp(stk_store_describe(s), "") == 0);
    stk_store_close(s, false);

    static const uint64_t sizes[] = { 100, 5000, 100 };
    struct swap_world w;
    swap_world_init(&w, &swap_kinds[0], sizes, 3);
    OPEN(&w);
    CHECK(stk_store_get(w.s, 1, w.work) == STK_ERR_STATE); /* before its put */
    SAYS(w.s, "item 1 was never put");
    CHECK(stk_store_prefetch(w.s, 1) == STK_ERR_STATE);
    CHECK(stk_store_get(w.s, 3, w.work) == STK_ERR_CONFIG); /* unknown */
    SAYS(w.s, "item 3 was asked for; there are 3");
    CHECK(stk_store_put(w.s, UINT32_MAX, w.work) == STK_ERR_CONFIG);
    CHECK(stk_store_prefetch(w.s, 3) == STK_ERR_CONFIG);
    CHECK(stk_store_put(w.s, 0, NULL) == STK_ERR_CONFIG);
    SAYS(w.s, "NULL");
    CHECK(stk_store_commit(w.s, 1, NULL, 0) == STK_ERR_STATE);
    SAYS(w.s, "durable");
    CHECK(stk_store_durable(w.s, NULL, NULL, NULL) == STK_END);
    OK(&w, stk_store_flush(w.s)); /* nothing to do */
    PUT(&w, 1, 4);                /* refusals changed nothing */
    CHECK(stk_store_get(w.s, 1, NULL) == STK_ERR_CONFIG);
    CHECK(get_guarded(&w, 1, 4, false));
    CHECK(strcmp(stk_store_error(w.s), "") == 0);
    swap_world_close(&w);
}

static void refused(struct swap_world *w, stk_status wanted, const char *word)
{
    uint64_t before = sys_alloc_bytes();
    stk_status st = stk_store_open(&w->c, &w->s);
    if (st != wanted || !strstr(stk_store_error(w->s), word)) {
        printf("# %s, wanted %s with '%s': %s\n", stk_status_name(st), stk_status_name(wanted),
               word, stk_store_error(w->s));
        test_fail(__FILE__, __LINE__, "refused");
    }
    stk_store_close(w->s, true);
    w->s = NULL;
    CHECK(sys_alloc_bytes() == before);
}

TEST(store_api_configurations_that_cannot_be_are_refused_with_a_sentence)
{
    static const uint64_t sizes[] = { 100, 5000, 100 }, empty[] = { 100, 0 };
    struct swap_world w;
    swap_world_init(&w, &swap_kinds[0], sizes, 3);
    const stk_store_config good = w.c;
#define BAD(change, status, word) \
    w.c = good;                   \
    change;                       \
    refused(&w, status, word)
    BAD(w.c.size = 8, STK_ERR_CONFIG, "stk_store_config_init");
    BAD(w.c.nvme[0] = NULL, STK_ERR_CONFIG, "folder");
    BAD(w.c.nvme[0] = "", STK_ERR_CONFIG, "empty");
    BAD(w.c.n_items = 0, STK_ERR_CONFIG, "n_items is 0");
    BAD(w.c.item_bytes = NULL, STK_ERR_CONFIG, "NULL");
    BAD((w.c.item_bytes = empty, w.c.n_items = 2), STK_ERR_CONFIG, "item 1 has 0 bytes");
    BAD(w.c.nvme_weights[0] = -1, STK_ERR_CONFIG, "nvme_weights[0]");
    BAD(w.c.storage = (stk_storage)17, STK_ERR_CONFIG, "17");
    BAD(w.c.sim_disk = NULL, STK_ERR_CONFIG, "sim_disk");
    BAD(w.c.adopt = true, STK_ERR_CONFIG, "durable");
    BAD((w.c.adopt = w.c.durable = true), STK_ERR_CONFIG, "run_id");
    BAD(strcpy(w.c.run_id, "xyz"), STK_ERR_CONFIG, "16 of 0-9a-f");
    BAD(w.c.buffer_bytes = 1ull << 50, STK_OK, ""); /* no more than the items need is taken */
    w.c = good;
    OPEN(&w);
    swap_world_close(&w);
}

/* A config of an older, shorter program works. */
TEST(store_api_a_shorter_configuration_gets_defaults)
{
    static const uint64_t sizes[] = { 100 };
    struct swap_world w;
    swap_world_init(&w, &swap_kinds[N_KINDS - 1], sizes, 1);
    stk_store_config_init(&w.c, offsetof(stk_store_config, durable));
    w.c.nvme[0] = w.dir;
    w.c.item_bytes = sizes;
    w.c.n_items = 1;
    memset((char *)&w.c + w.c.size, 0x77, sizeof w.c - w.c.size);
    OPEN(&w);
    PUT(&w, 0, 1);
    CHECK(get_guarded(&w, 0, 1, true));
    swap_world_close(&w);
}

TEST(store_api_a_disk_without_room_is_refused_at_open)
{
    static const uint64_t sizes[] = { 1 << 20, 1 << 20 };
    struct swap_world w;
    swap_world_init(&w, &swap_kinds[0], sizes, 2);
    io_sim_disk_free(w.disk);
    struct stk_error err = { 0 };
    CHECK_OK(io_sim_disk_new(1500000, &w.disk, &err), &err);
    w.sim.disk = w.disk;
    refused(&w, STK_ERR_NOSPACE, "bytes");
    CHECK(io_sim_free_bytes(w.disk) == 1500000);
    swap_world_close(&w);
    uint64_t huge[] = { 1ull << 46 };
    swap_world_init(&w, &swap_kinds[N_KINDS - 1], sizes, 1);
    w.c.item_bytes = huge;
    refused(&w, STK_ERR_NOMEM, "buffer_bytes"); /* the buffers alone */
    uint64_t many[1];
    many[0] = 1ull << 20;
    w.c.item_bytes = many;
    char missing[600];
    snprintf(missing, sizeof missing, "%s/none", w.dir);
    w.c.nvme[0] = missing;
    refused(&w, STK_ERR_IO, "none");
    CHECK(folder_is_empty(w.dir));
    swap_world_close(&w);
}

/* Every call of open that asks the system fails once: a clean error, nothing left behind. */
TEST(store_api_open_fails_cleanly_whatever_is_missing)
{
    static const uint64_t sizes[] = { 5000, 5000, 5000 };
    static const enum sys_call calls[] = { SYS_ALLOC, SYS_MMAP, SYS_OPEN, SYS_ALLOCATE,
                                           SYS_THREAD };
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++) {
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[N_KINDS - 1], sizes, 3);
        uint64_t before = sys_alloc_bytes();
        stk_status st = STK_ERR_IO;
        for (uint64_t n = 1; st != STK_OK && n < 500; n++) {
            sys_fault_arm(calls[c], n, 1, calls[c] == SYS_ALLOCATE ? ENOSPC : ENOMEM);
            st = stk_store_open(&w.c, &w.s);
            bool hit = sys_fault_seen(calls[c]) >= n;
            sys_fault_arm(calls[c], 0, 0, 0);
            if (st != STK_OK) CHECK(hit && (!w.s || stk_store_error(w.s)[0]));
            /* what is not necessary may be missing: the store then works all the same */
            if (st == STK_OK && hit) st = STK_ERR_IO;
            stk_store_close(w.s, false);
            CHECK(sys_alloc_bytes() == before);
            CHECK(folder_is_empty(w.dir));
        }
        CHECK(st == STK_OK);
        w.s = NULL;
        swap_world_close(&w);
    }
}

/* --- buffers ---------------------------------------------------------------------------------- */

TEST(store_api_nvm_08_two_buffers_are_enough_and_fewer_are_refused)
{
    uint64_t sizes[10];
    for (uint32_t i = 0; i < 10; i++) sizes[i] = 9000 - i;
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, 10);
        w.c.buffer_bytes = 2 * 12288 - 1;
        refused(&w, STK_ERR_CONFIG, "24576");
        w.c.buffer_bytes = 1;
        refused(&w, STK_ERR_CONFIG, "item 0 has 9000 bytes");
        for (uint64_t buffers = 2; buffers <= 8; buffers++) {
            w.c.buffer_bytes = buffers * 12288;
            OPEN(&w);
            random_use(&w, 400, test_seed() + buffers);
            CHECK(w.s->memory_bytes <= w.c.buffer_bytes);
            stk_store_close(w.s, true);
            w.s = NULL;
        }
        swap_world_close(&w);
    }
}

TEST(store_api_what_lies_in_a_buffer_is_not_read)
{
    uint64_t sizes[16];
    for (uint32_t i = 0; i < 16; i++) sizes[i] = 8192;
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, 16);
        w.c.buffer_bytes = 8 * 8192;
        OPEN(&w);
        stk_store_stats t;
        for (uint32_t i = 0; i < 16; i++) {
            PUT(&w, i, 1);
            OK(&w, stk_store_flush(w.s)); /* the order of their ends is that of the puts */
        }
        for (uint32_t i = 15; i >= 9; i--) CHECK(get_guarded(&w, i, 1, true)); /* put lately */
        stk_store_stats_read(w.s, &t);
        CHECK(t.hits == 7 && t.misses == 0 && t.read_bytes == 0);
        CHECK(get_guarded(&w, 0, 1, false)); /* read through a buffer, and kept */
        CHECK(get_guarded(&w, 0, 1, true));
        stk_store_stats_read(w.s, &t);
        CHECK(t.hits == 8 && t.misses == 1 && t.read_bytes == 8192);
        CHECK(get_guarded(&w, 1, 1, true) && get_guarded(&w, 1, 1, true)); /* direct: not kept */
        stk_store_stats_read(w.s, &t);
        CHECK(t.hits == 8 && t.misses == 3 && t.read_bytes == 3 * 8192);
        OK(&w, stk_store_prefetch(w.s, 2));
        OK(&w, stk_store_prefetch(w.s, 2)); /* is on its way, or there */
        CHECK(get_guarded(&w, 2, 1, true));
        stk_store_stats_read(w.s, &t);
        CHECK(t.hits == 9 && t.misses == 3 && t.read_bytes == 4 * 8192);
        CHECK(t.put_bytes == 16 * 8192 && t.write_bytes == 16 * 8192);
        swap_world_close(&w);
    }
}

TEST(store_api_reading_ahead_ends_with_busy_and_never_waits)
{
    uint64_t sizes[64];
    for (uint32_t i = 0; i < 64; i++) sizes[i] = 6000;
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, 64);
        w.c.buffer_bytes = 8 * 8192;
        OPEN(&w);
        for (uint32_t i = 0; i < 64; i++) PUT(&w, i, 1);
        OK(&w, stk_store_flush(w.s));
        stk_store_stats a, b;
        stk_store_stats_read(w.s, &a);
        uint32_t n = 0;
        stk_status st = STK_OK;
        while (n < 64 && (st = stk_store_prefetch(w.s, n)) == STK_OK) n++;
        CHECK(st == STK_BUSY && n == 6 && stk_store_error(w.s)[0] == '\0');
        stk_store_stats_read(w.s, &b);
        CHECK(a.waits == b.waits && a.wait_ns == b.wait_ns);
        PUT(&w, 60, 2); /* the quarter that is left */
        PUT(&w, 61, 2);
        for (uint32_t i = 0; i < n; i++) CHECK(get_guarded(&w, i, 1, false));
        stk_store_stats_read(w.s, &b);
        CHECK(b.misses == 0);
        /* What is asked for and never got does not block reading ahead for ever. */
        for (uint32_t i = 10; i < 16; i++) stk_store_prefetch(w.s, i);
        for (uint32_t i = 0; i < 40; i++) CHECK(get_guarded(&w, 20 + i % 30, 1, false));
        st = stk_store_prefetch(w.s, 55);
        CHECK(st == STK_OK || w.s->n_under_way > 0);
        swap_world_close(&w);
    }
}

/* A consumer of random speed behind a ring of read-aheads: thousands of items, every byte right. */
TEST(store_api_nvm_38_a_slow_reader_and_reused_buffers)
{
    enum { N = 2000 };
    static uint64_t sizes[N];
    for (uint32_t i = 0; i < N; i++) sizes[i] = 1 + rng_hash64(i) % 9000;
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, N);
        w.c.buffer_bytes = 12 * 12288;
        OPEN(&w);
        for (uint32_t i = 0; i < N; i++) PUT(&w, i, 1);
        uint32_t ahead = 0, wrong = 0;
        struct rng r;
        rng_seed(&r, test_seed());
        for (uint32_t i = 0; i < N; i++) {
            while (ahead < N && (ahead <= i || stk_store_prefetch(w.s, ahead) == STK_OK)) ahead++;
            for (uint64_t spin = rng_below(&r, 4); spin; spin--) sched_yield();
            wrong += !get_guarded(&w, i, 1, rng_below(&r, 2));
            if (rng_below(&r, 3) == 0) PUT(&w, i, 2);
        }
        CHECK(wrong == 0);
        stk_store_stats t;
        stk_store_stats_read(w.s, &t);
        if (k == swap_kinds) CHECK(t.hits > N / 2); /* elsewhere it depends on the drive */
        swap_world_close(&w);
    }
}

/* Items are handed over while their neighbours are written: the wait is for the item alone. */
TEST(store_api_an_item_put_again_and_again_keeps_the_last_bytes)
{
    static const uint64_t sizes[] = { 70000, 70000, 5 };
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, 3);
        OPEN(&w);
        for (uint64_t gen = 1; gen < 60; gen++) {
            PUT(&w, (uint32_t)(gen % 3), gen);
            CHECK(get_guarded(&w, (uint32_t)(gen % 3), gen, gen % 2));
        }
        for (uint32_t i = 0; i < 3; i++) CHECK(get_guarded(&w, i, 57 + i, false));
        swap_world_close(&w);
    }
}

TEST(store_api_nothing_is_allocated_after_open)
{
    uint64_t sizes[40];
    for (uint32_t i = 0; i < 40; i++) sizes[i] = 3000 + i;
    FOR_KINDS(k)
    {
        uint64_t start = sys_alloc_bytes();
        struct swap_world w;
        swap_world_init(&w, k, sizes, 40);
        OPEN(&w);
        random_use(&w, 50, 1);
        uint64_t before = sys_alloc_bytes();
        /* tables as said, and what execution and io take whatever the items are */
        if (!w.disk) CHECK(before - start <= w.s->table_bytes + (1 << 20));
        /* the simulated disk itself grows */
        random_use(&w, 300, 2);
        OK(&w, stk_store_flush(w.s));
        if (!w.disk) CHECK(sys_alloc_bytes() == before);
        swap_world_close(&w);
        CHECK(sys_alloc_bytes() == start);
    }
}

TEST(store_api_nvm_04_two_stores_on_one_path_do_not_meet)
{
    uint64_t sizes[20];
    for (uint32_t i = 0; i < 20; i++) sizes[i] = 4000 + i * 100;
    FOR_KINDS(k)
    {
        struct swap_world a, b;
        swap_world_init(&a, k, sizes, 20);
        swap_world_init(&b, k, sizes, 20);
        if (!a.disk) b.c.nvme[0] = a.dir;
        OPEN(&a);
        OPEN(&b);
        for (uint64_t gen = 1; gen < 4; gen++)
            for (uint32_t i = 0; i < 20; i++) {
                PUT(&a, i, gen);
                PUT(&b, i, gen + 100);
            }
        for (uint32_t i = 0; i < 20; i++)
            CHECK(get_guarded(&a, i, 3, false) && get_guarded(&b, i, 103, false));
        stk_store_close(a.s, false);
        a.s = NULL;
        for (uint32_t i = 0; i < 20; i++) CHECK(get_guarded(&b, i, 103, true));
        swap_world_close(&b);
        if (!a.disk) CHECK(folder_is_empty(a.dir));
        swap_world_close(&a);
    }
}

/* NVM-35. */
TEST(store_api_nvm_35_a_child_of_fork_is_refused_and_harms_nothing)
{
    static const uint64_t sizes[] = { 70000, 70000, 70000 };
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, 3);
        OPEN(&w);
        for (uint32_t i = 0; i < 3; i++) PUT(&w, i, 1);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            bool ok = stk_store_put(w.s, 0, w.work) == STK_ERR_STATE &&
                      stk_store_get(w.s, 0, w.work) == STK_ERR_STATE &&
                      stk_store_prefetch(w.s, 0) == STK_ERR_STATE &&
                      stk_store_flush(w.s) == STK_ERR_STATE &&
                      strstr(stk_store_error(w.s), "fork") != NULL;
            stk_store_close(w.s, true);
            _exit(ok ? 0 : 1);
        }
        for (uint32_t i = 0; i < 3; i++) PUT(&w, i, 2);
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        for (uint32_t i = 0; i < 3; i++) CHECK(get_guarded(&w, i, 2, true));
        swap_world_close(&w);
    }
}

/* --- errors ----------------------------------------------------------------------------------- */

static const uint64_t four[] = { 20000, 20000, 20000, 8192 };

TEST(store_api_nvm_02_a_write_that_fails_is_reported_by_the_next_call_and_stays)
{
    for (int next = 0; next < 5; next++) {
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[0], four, 4);
        OPEN(&w);
        PUT(&w, 0, 1);
        OK(&w, stk_store_flush(w.s));
        w.sim.faults = next % 2 ? (struct io_sim_faults){ .write_error_ppm = 1000000 }
                                : (struct io_sim_faults){ .no_space_ppm = 1000000 };
        stk_status want = next % 2 ? STK_ERR_IO : STK_ERR_NOSPACE, st = STK_OK;
        PUT(&w, 2, 1);
        for (int i = 0; i < 4 && st == STK_OK; i++) /* a call that waits lets the write run */
            st = next == 0   ? stk_store_flush(w.s)
                 : next == 1 ? stk_store_put(w.s, 2, w.work)
                 : next == 2 ? (swap_wait(w.s, "test", 2), stk_store_get(w.s, 0, w.work))
                 : next == 3 ? (swap_wait(w.s, "test", 2), stk_store_prefetch(w.s, 0))
                             : stk_store_flush(w.s);
        CHECK(st == want);
        SAYS(w.s, "item 2 was put and could not be written");
        w.sim.faults = (struct io_sim_faults){ 0 };
        CHECK(stk_store_get(w.s, 0, w.work) == STK_ERR_STATE); /* FAILED for good */
        SAYS(w.s, "item 2");
        CHECK(stk_store_put(w.s, 2, w.work) == STK_ERR_STATE);
        CHECK(stk_store_prefetch(w.s, 0) == STK_ERR_STATE && stk_store_flush(w.s) == STK_ERR_STATE);
        CHECK(stk_store_commit(w.s, 1, NULL, 0) == STK_ERR_STATE);
        swap_world_close(&w);
    }
}

TEST(store_api_a_flush_that_fails_is_a_failure)
{
    struct swap_world w;
    swap_world_init(&w, &swap_kinds[0], four, 4);
    OPEN(&w);
    PUT(&w, 0, 1);
    OK(&w, stk_store_flush(w.s));
    w.sim.faults.write_error_ppm = 1000000;
    CHECK(stk_store_flush(w.s) == STK_ERR_IO);
    SAYS(w.s, "flush");
    CHECK(stk_store_get(w.s, 0, w.work) == STK_ERR_STATE);
    swap_world_close(&w);
}

/* Out of the buffer, so that the next get reads. */
static void put_out(struct swap_world *w, uint32_t item)
{
    PUT(w, item, 1);
    OK(w, stk_store_flush(w->s));
    swap_drop(w->s, swap_find(w->s, item));
}

TEST(store_api_nvm_23_a_read_that_fails_is_told_once_and_can_be_tried_again)
{
    for (int way = 0; way < 4; way++) { /* through a buffer or not, read ahead or not */
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[0], four, 4);
        OPEN(&w);
        uint32_t item = way % 2 ? 3 : 1;
        put_out(&w, item);
        w.sim.faults.read_error_ppm = 1000000;
        if (way >= 2) {
            OK(&w, stk_store_prefetch(w.s, item));
            swap_wait(w.s, "test", item);
        }
        CHECK(stk_store_get(w.s, item, w.work) == STK_ERR_IO);
        SAYS(w.s, item == 3 ? "item 3" : "item 1");
        PUT(&w, 0, 5); /* the store goes on */
        w.sim.faults = (struct io_sim_faults){ 0 };
        CHECK(get_guarded(&w, item, 1, true) && get_guarded(&w, 0, 5, true));
        swap_world_close(&w);
    }
}

TEST(store_api_bytes_that_changed_on_disk_are_found)
{
    for (int way = 0; way < 4; way++) {
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[0], four, 4);
        OPEN(&w);
        uint32_t item = way % 2 ? 3 : 1;
        put_out(&w, item);
        PUT(&w, 0, 1);
        const char *path;
        uint64_t at;
        REQUIRE(store_locate(w.s->store, item, &path, &at) == STK_OK);
        REQUIRE(io_sim_flip(w.disk, path, at + 777, 3));
        if (way >= 2) OK(&w, stk_store_prefetch(w.s, item));
        CHECK(stk_store_get(w.s, item, w.work) == STK_ERR_CORRUPT);
        SAYS(w.s, item == 3 ? "item 3" : "item 1");
        SAYS(w.s, "extents-0.bin");
        CHECK(stk_store_get(w.s, item, w.work) == STK_ERR_CORRUPT); /* and found again */
        CHECK(get_guarded(&w, 0, 1, true));
        PUT(&w, item, 9); /* put anew, it is whole again */
        OK(&w, stk_store_flush(w.s));
        swap_drop(w.s, swap_find(w.s, item));
        CHECK(get_guarded(&w, item, 9, true));
        swap_world_close(&w);
    }
}

/* The same on real files: a byte changed, and a file cut short, under an open store. */
TEST(store_api_real_files_that_change_under_the_store)
{
    for (size_t kind = 2; kind < N_KINDS; kind++) {
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[kind], four, 4);
        OPEN(&w);
        const char *path;
        uint64_t at;
        uint8_t byte;
        put_out(&w, 0);
        put_out(&w, 3);
        REQUIRE(store_locate(w.s->store, 3, &path, &at) == STK_OK);
        int fd = sys_open(path, O_RDWR, 0);
        REQUIRE(fd >= 0 && pread(fd, &byte, 1, (off_t)at + 5000) == 1);
        byte ^= 64;
        REQUIRE(pwrite(fd, &byte, 1, (off_t)at + 5000) == 1 && sys_fsync(fd) == 0);
        CHECK(stk_store_get(w.s, 3, w.work + 1) == STK_ERR_CORRUPT);
        SAYS(w.s, path);
        REQUIRE(ftruncate(fd, (off_t)at) == 0);
        CHECK(stk_store_get(w.s, 3, w.work) == STK_ERR_IO); /* straight into our memory */
        SAYS(w.s, path);
        CHECK(stk_store_get(w.s, 3, w.work + 1) == STK_ERR_IO);
        CHECK(get_guarded(&w, 0, 1, true)); /* the others are there */
        sys_close(fd);
        swap_world_close(&w);
    }
}

/* Get, read ahead, put: the buffer of the item that is worked on is not taken meanwhile. */
TEST(store_api_reading_ahead_leaves_the_item_in_hand)
{
    uint64_t sizes[32];
    for (uint32_t i = 0; i < 32; i++) sizes[i] = 6000;
    FOR_KINDS(k)
    {
        struct swap_world w;
        swap_world_init(&w, k, sizes, 32);
        w.c.buffer_bytes = 4 * 8192;
        OPEN(&w);
        for (uint32_t i = 0; i < 32; i++) PUT(&w, i, 1);
        for (uint32_t i = 0, ahead = 1; i < 32; i++) {
            CHECK(get_guarded(&w, i, 1, false));
            if (ahead <= i) ahead = i + 1;
            while (ahead < 32 && stk_store_prefetch(w.s, ahead) == STK_OK) ahead++;
            CHECK(swap_find(w.s, i) != NULL);
            PUT(&w, i, 2);
        }
        stk_store_stats t;
        stk_store_stats_read(w.s, &t);
        CHECK(t.read_bytes <= 32 * 8192); /* nothing was read twice */
        swap_world_close(&w);
    }
}

TEST(store_api_a_completion_that_never_comes_ends_as_stalled)
{
    for (int way = 0; way < 4; way++) {
        uint64_t before = sys_alloc_bytes();
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[0], four, 4);
        OPEN(&w);
        put_out(&w, 3);
        put_out(&w, 1);
        w.sim.faults.lost_completion_ppm = 1000000;
        stk_status st;
        if (way == 0) st = stk_store_get(w.s, 3, w.work);          /* direct */
        else if (way == 1) st = stk_store_get(w.s, 1, w.work + 1); /* through a buffer */
        else if (way == 2) st = stk_store_flush(w.s);
        else st = stk_store_put(w.s, 0, w.work), st = stk_store_put(w.s, 0, w.work);
        CHECK(st == STK_ERR_STALLED);
        SAYS(w.s, "nothing has been finished");
        CHECK(stk_store_get(w.s, 1, w.work) == STK_ERR_STATE);
        swap_world_close(&w);
        CHECK(sys_alloc_bytes() == before);
    }
}

/* Faults of every kind by seed: the right bytes, or an error that names the item; never silence. */
TEST(store_api_faults_by_seed_give_right_bytes_or_a_clean_error)
{
    uint64_t sizes[12], base = test_seed();
    uint32_t clean = 0, failed = 0, n = getenv("STK_SOAK") ? 20000 : 300;
    for (uint32_t i = 0; i < 12; i++) sizes[i] = 1 + rng_hash64(i) % 30000;
    sizes[3] = 8192;
    for (uint32_t seed = 0; seed < n; seed++) {
        uint64_t before = sys_alloc_bytes();
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[0], sizes, 12);
        w.c.seed = w.sim.seed = base + seed;
        w.c.buffer_bytes = (2 + seed % 5) * 32768;
        w.sim.latency_ns = 50000;
        w.sim.read_bytes_per_s = w.sim.write_bytes_per_s = 1e9;
        uint32_t ppm = seed % 4 ? 3000 : 0;
        w.sim.faults = (struct io_sim_faults){
            .read_error_ppm = ppm, .write_error_ppm = ppm / 4, .short_ppm = 30000,
            .no_space_ppm = ppm / 8, .flip_bit_ppm = ppm, .rot_bit_ppm = ppm / 2,
            .misdirect_ppm = ppm / 2, .lost_write_ppm = ppm / 2,
            .lost_completion_ppm = ppm / 16, .late_ppm = 20000, .reorder_ppm = 50000,
            .late_ns = 3000000 };
        OPEN(&w);
        uint32_t errors = random_use(&w, 150, base + seed);
        if (errors) failed++;
        else clean++;
        if (test_failures) {
            printf("# at turn %u\n", seed);
            return;
        }
        swap_world_close(&w);
        CHECK(sys_alloc_bytes() == before);
    }
    CHECK(clean >= n / 4 && failed > n / 10);
}

/* The same seed, the same decisions. */
TEST(store_api_a_simulated_store_is_a_function_of_its_seed)
{
    uint64_t hash[3];
    for (int i = 0; i < 3; i++) {
        struct swap_world w;
        swap_world_init(&w, &swap_kinds[0], four, 4);
        w.c.seed = w.sim.seed = i == 2 ? 8 : 7;
        w.sim.latency_ns = 1000;
        w.sim.faults = (struct io_sim_faults){ .late_ppm = 500000, .late_ns = 100000 };
        OPEN(&w);
        random_use(&w, 100, 3);
        hash[i] = exec_trace_hash(w.s->ex);
        swap_world_close(&w);
    }
    CHECK(hash[0] == hash[1] && hash[0] != hash[2] && hash[0] != 0);
}

TEST_MAIN()
