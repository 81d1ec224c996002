/* Tests of trainer/hf_out.c and hf_folder.c: shards and their index, and what a failure at any file
 * operation leaves. */
#include "tests/test.h"

#include "base/sys.h"
#include "trainer/hf_out.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64], partial[128], out[128];

static void begin(void)
{
    snprintf(root, sizeof root, "/tmp/stoker-hf-XXXXXX");
    STK_ASSERT(mkdtemp(root));
    snprintf(partial, sizeof partial, "%s/m.partial", root);
    snprintf(out, sizeof out, "%s/m", root);
}

static void end(void) { sys_remove_tree(root); }

static stk_status values(void *arg, const struct model_tensor *t, uint64_t first, uint64_t n,
                         uint16_t *to, struct stk_error *err)
{
    (void)arg;
    (void)err;
    for (uint64_t i = 0; i < n; i++) to[i] = (uint16_t)((first + i) * 7 + (uint64_t)t->role);
    return STK_OK;
}

static uint16_t buf[500];

static struct hf_job job(const struct model_config *cfg, uint64_t shard_bytes)
{
    return (struct hf_job){ .cfg = cfg, .dtype = ST_BF16, .read = values, .buf = buf,
                            .buf_bytes = sizeof buf, .shard_bytes = shard_bytes };
}

static void config(struct model_config *cfg)
{
    struct stk_error err = { 0 };
    char path[512];
    snprintf(path, sizeof path, "%s/llama_gqa_old/config.json", getenv("STK_GOLDEN"));
    if (model_config_read(path, cfg, &err) != STK_OK) fprintf(stderr, "%s\n", err.text), abort();
}

static bool exists(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static void check_values(const char *folder, const struct model_config *cfg)
{
    struct stk_error err = { 0 };
    struct st_set *set;
    struct model_tensor want[64];
    uint16_t got[500];
    uint32_t n = model_tensors(cfg, NULL);
    REQUIRE(n <= 64);
    model_tensors(cfg, want);
    CHECK_OK(st_set_open(folder, &set, &err), &err);
    CHECK(st_set_count(set) == n);
    for (uint32_t i = 0; i < n; i++) {
        const struct st_tensor *t = st_set_find(set, want[i].name);
        REQUIRE(t != NULL);
        for (uint64_t at = 0; at < t->n_elements; at += 500) {
            uint64_t k = t->n_elements - at < 500 ? t->n_elements - at : 500;
            CHECK_OK(st_set_read(set, t, at * 2, k * 2, got, &err), &err);
            for (uint64_t e = 0; e < k; e++)
                CHECK(got[e] == (uint16_t)((at + e) * 7 + (uint64_t)want[i].role));
        }
    }
    st_set_close(set);
}

TEST(hf_shards_have_an_index_that_names_them)
{
    struct stk_error err = { 0 };
    struct model_config cfg;
    begin();
    config(&cfg);
    struct hf_job j = job(&cfg, 6000);
    CHECK_OK(hf_write(&j, partial, &err), &err);
    CHECK_OK(hf_publish(partial, out, &err), &err);
    CHECK(exists(out, "model.safetensors.index.json") && !exists(out, "model.safetensors"));
    CHECK(exists(out, "config.json") && access(partial, F_OK) != 0);
    check_values(out, &cfg);
    /* a single file takes their place, and none of them stays */
    j = job(&cfg, 0);
    CHECK_OK(hf_write(&j, partial, &err), &err);
    CHECK_OK(hf_publish_into(partial, out, &err), &err);
    CHECK(exists(out, "model.safetensors") && !exists(out, "model.safetensors.index.json"));
    check_values(out, &cfg);
    DIR *d = opendir(out);
    uint32_t n = 0;
    while (readdir(d)) n++;
    closedir(d);
    CHECK(n == 2 + 2); /* . .. config.json model.safetensors */
    model_config_free(&cfg);
    end();
}

/* Whatever call fails, the sentence is there and nothing in `out` looks like a model (USE,
 * CKP-16). */
TEST(hf_a_failure_anywhere_leaves_no_model)
{
    static const enum sys_call kinds[] = { SYS_ALLOC, SYS_OPEN, SYS_WRITE, SYS_FSYNC, SYS_RENAME,
                                           SYS_ALLOCATE, SYS_READ };
    struct model_config cfg;
    config(&cfg);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (uint64_t n = 1;; n++) {
            struct stk_error err = { 0 };
            begin();
            struct hf_job j = job(&cfg, 30000); /* two shards */
            sys_fault_arm(kinds[k], n, 1, ENOSPC);
            stk_status st = hf_write(&j, partial, &err);
            if (st == STK_OK) st = hf_publish(partial, out, &err);
            uint64_t seen = sys_fault_seen(kinds[k]);
            sys_fault_arm(kinds[k], 0, 0, 0);
            if (st != STK_OK) CHECK(!exists(out, "config.json") && err.text[0]);
            else check_values(out, &cfg);
            end();
            if (seen < n) {
                CHECK(n > 1);
                break;
            }
        }
    model_config_free(&cfg);
}

TEST_MAIN()
