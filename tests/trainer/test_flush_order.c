/* tests/trainer/test_flush_order.c - what is published by a rename was flushed before it, and the
 * rename itself after it: for checkpoints (formats/manifest.c) and finished models
 * (trainer/hf_folder.c).
 *
 * A dropped fsync changes nothing that a running system shows, so no other test finds it. Here the
 * linker gives the file calls of base/sys.h to this file (meson.build: --wrap), which keeps a book
 * of what is not on the medium yet. */
#include "tests/test.h"

#include "base/sys.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "trainer/hf_out.h"

#include <unistd.h>

/* --- the book: paths with something that a power cut would take --------------------------------- */

enum { BOOK_MAX = 64 };
static struct entry { char path[512]; bool folder; } book[BOOK_MAX];
static uint32_t n_book, published, broken;
static char lose[64]; /* a flush of a path that ends so is swallowed: the test of the test */

static void open_item(const char *path, bool folder)
{
    for (uint32_t i = 0; i < n_book; i++)
        if (strcmp(book[i].path, path) == 0) return;
    STK_ASSERT(n_book < BOOK_MAX);
    snprintf(book[n_book].path, sizeof book[0].path, "%s", path);
    book[n_book++].folder = folder;
}

static void close_item(const char *path)
{
    size_t n = strlen(path), k = strlen(lose);
    if (k && n >= k && strcmp(path + n - k, lose) == 0) return;
    for (uint32_t i = 0; i < n_book; i++)
        if (strcmp(book[i].path, path) == 0) book[i--] = book[--n_book];
}

static void parent_of(const char *path, char *out, size_t size)
{
    snprintf(out, size, "%s", path);
    char *slash = strrchr(out, '/');
    if (slash) *slash = '\0';
}

static void path_of(int fd, char *out, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, size - 1);
    out[n > 0 ? n : 0] = '\0';
}

static bool inside(const char *path, const char *folder)
{
    size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

int64_t __real_sys_write_full(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int __real_sys_fsync(int fd);
int __real_sys_fsync_dir(const char *path);
int __real_sys_rename(const char *from, const char *to);
int64_t __wrap_sys_write_full(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes);
int __wrap_sys_fsync(int fd);
int __wrap_sys_fsync_dir(const char *path);
int __wrap_sys_rename(const char *from, const char *to);

int64_t __wrap_sys_write_full(int fd, const void *buf, uint64_t size_bytes, uint64_t offset_bytes)
{
    char path[512], parent[512];
    path_of(fd, path, sizeof path);
    parent_of(path, parent, sizeof parent);
    open_item(path, false);
    open_item(parent, true);
    return __real_sys_write_full(fd, buf, size_bytes, offset_bytes);
}

int __wrap_sys_fsync(int fd)
{
    char path[512];
    path_of(fd, path, sizeof path);
    close_item(path);
    return __real_sys_fsync(fd);
}

int __wrap_sys_fsync_dir(const char *path)
{
    close_item(path);
    return __real_sys_fsync_dir(path);
}

/* The new name is visible from here on: nothing under the old one may be open. A former version
 * that steps aside (its name begins with a dot) is no publication. */
int __wrap_sys_rename(const char *from, const char *to)
{
    char parent[512], renamed[512];
    const char *name = strrchr(to, '/') ? strrchr(to, '/') + 1 : to;
    for (uint32_t i = 0; i < n_book; i++) {
        if (!inside(book[i].path, from)) continue;
        if (name[0] != '.') {
            broken++;
            if (!lose[0]) printf("# %s is renamed to %s, %s is not flushed\n", from, to, book[i].path);
        }
        snprintf(renamed, sizeof renamed, "%.200s%.200s", to, book[i].path + strlen(from));
        memcpy(book[i].path, renamed, sizeof renamed);
    }
    published++;
    int rc = __real_sys_rename(from, to);
    parent_of(to, parent, sizeof parent);
    if (rc == 0) open_item(parent, true);
    return rc;
}

/* --- what is published -------------------------------------------------------------------------- */

static char root[64];

static void begin(const char *swallow)
{
    snprintf(root, sizeof root, "/tmp/stoker-flush-XXXXXX");
    STK_ASSERT(mkdtemp(root));
    n_book = published = broken = 0;
    snprintf(lose, sizeof lose, "%s", swallow);
}

/* Left open: what was published and could vanish. */
static uint32_t end(void)
{
    uint32_t left = broken;
    for (uint32_t i = 0; i < n_book; i++) {
        if (strcmp(book[i].path, root) != 0 && !inside(book[i].path, root)) continue;
        left++;
        if (!lose[0]) printf("# %s is not flushed at the end\n", book[i].path);
    }
    lose[0] = '\0';
    sys_remove_tree(root);
    return left;
}

static void write_checkpoint(uint64_t step)
{
    struct stk_error err = { 0 };
    struct st_writer *w;
    char dir[128], path[512], data[640] = "x", *partial;
    snprintf(dir, sizeof dir, "%s/checkpoints", root);
    CHECK_OK(manifest_begin(dir, step, &partial, &err), &err);
    REQUIRE(partial != NULL);
    snprintf(path, sizeof path, "%s/state-00001.safetensors", partial);
    uint64_t shape[1] = { 160 };
    uint32_t index;
    CHECK_OK(st_writer_new(path, NULL, &w, &err), &err);
    CHECK_OK(st_writer_declare(w, "t", ST_F32, 1, shape, &index, &err), &err);
    CHECK_OK(st_writer_begin(w, &err), &err);
    CHECK_OK(st_writer_write(w, index, 0, data, sizeof data, &err), &err);
    CHECK_OK(st_writer_finish(w, &err), &err);
    CHECK_OK(manifest_commit(dir, step, partial, NULL, &err), &err);
    sys_free(partial);
}

static uint32_t checkpoint_left(const char *swallow)
{
    begin(swallow);
    write_checkpoint(7);
    write_checkpoint(8);
    write_checkpoint(7); /* replaces one */
    CHECK(published >= 3);
    return end();
}

TEST(checkpoint_is_flushed_before_it_is_renamed)
{
    CHECK(checkpoint_left("") == 0);
    /* each flush that is missing is found */
    CHECK(checkpoint_left("manifest.json") > 0);
    CHECK(checkpoint_left(".partial-step-00000007") > 0);
    CHECK(checkpoint_left("/checkpoints") > 0);
}

static stk_status values(void *arg, const struct model_tensor *t, uint64_t first, uint64_t n,
                         uint16_t *to, struct stk_error *err)
{
    (void)arg;
    (void)t;
    (void)err;
    for (uint64_t i = 0; i < n; i++) to[i] = (uint16_t)(first + i);
    return STK_OK;
}

static void write_model(const char *swallow, bool into)
{
    struct stk_error err = { 0 };
    struct model_config cfg;
    static uint16_t buf[500];
    char path[512], partial[128], out[128];
    begin(swallow);
    snprintf(path, sizeof path, "%s/llama_gqa_old/config.json", getenv("STK_GOLDEN"));
    CHECK_OK(model_config_read(path, &cfg, &err), &err);
    snprintf(partial, sizeof partial, "%s/m.partial", root);
    snprintf(out, sizeof out, "%s/m", root);
    struct hf_job j = { .cfg = &cfg, .dtype = ST_BF16, .read = values, .buf = buf,
                        .buf_bytes = sizeof buf, .shard_bytes = 6000 };
    CHECK_OK(hf_write(&j, partial, &err), &err);
    if (into) CHECK(sys_mkdirs(out) == 0);
    CHECK_OK(into ? hf_publish_into(partial, out, &err) : hf_publish(partial, out, &err), &err);
    model_config_free(&cfg);
}

static uint32_t model_left(const char *swallow, bool into)
{
    write_model(swallow, into);
    return end();
}

TEST(finished_model_is_flushed_before_it_is_renamed)
{
    CHECK(model_left("", false) == 0);
    CHECK(model_left("", true) == 0);
    CHECK(model_left("config.json.partial", false) > 0);
    CHECK(model_left(".safetensors.partial", false) > 0);
}

TEST_MAIN()
