/* tests/formats/test_manifest.c - checkpoint folders: commit, search, damage, faults at every
 * call (CKP-07, 16, 17, 37). */
#include "tests/test.h"

#include "base/rng.h"
#include "formats/crc32.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "tests/formats/temp.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

static const char *in(const char *folder, const char *name)
{
    static char ring[4][700];
    static unsigned turn;
    char *out = ring[turn++ % 4];
    snprintf(out, sizeof ring[0], "%s/%s", folder, name);
    return out;
}

/* A checkpoint with two state files whose contents follow from `value`. */
static stk_status save(const char *dir, uint64_t step, float value, struct stk_error *err)
{
    char *partial;
    STK_TRY(manifest_begin(dir, step, &partial, err));
    stk_status status = STK_OK;
    for (int i = 1; i <= 2 && status == STK_OK; i++) {
        struct st_writer *w;
        uint32_t at;
        float data[64];
        for (int k = 0; k < 64; k++) data[k] = value + (float)(k * i);
        status = st_writer_new(
            in(partial, i == 1 ? "state-00001.safetensors" : "state-00002.safetensors"), NULL, &w,
            err);
        if (status != STK_OK) break;
        status = st_writer_declare(w, i == 1 ? "a" : "b", ST_F32, 1, (uint64_t[]){ 64 }, &at, err);
        if (status == STK_OK) status = st_writer_begin(w, err);
        if (status == STK_OK) status = st_writer_write(w, at, 0, data, sizeof data, err);
        if (status == STK_OK) status = st_writer_finish(w, err);
        else st_writer_abandon(w);
    }
    json_t *doc = json_pack("{s:f, s:{s:i}}", "loss_scale", 0.5, "client", "epoch", 3);
    if (status == STK_OK) status = manifest_commit(dir, step, partial, doc, err);
    else manifest_abandon(partial);
    json_decref(doc);
    sys_free(partial);
    return status;
}

/* Step and contents of the newest complete checkpoint; false: there is none, or it does not load.
 * */
static bool newest(const char *dir, uint64_t *step, float *value)
{
    char *path, *note;
    struct stk_error err = { 0 };
    struct st_file *f = NULL;
    stk_status status = manifest_newest(dir, &path, step, &note, &err);
    if (status == STK_OK) status = st_open(in(path, "state-00002.safetensors"), &f, &err);
    if (status == STK_OK) status = st_read(f, st_at(f, 0), 0, 4, value, &err);
    if (status != STK_OK)
        printf("# newest: %s %s, note: %s\n", stk_status_name(status), err.text,
               note ? note : "none");
    st_close(f);
    sys_free(path);
    sys_free(note);
    return status == STK_OK;
}

static bool newest_is(const char *dir, uint64_t step, float value)
{
    uint64_t found_step;
    float found_value;
    return newest(dir, &found_step, &found_value) && found_step == step && found_value == value;
}

static const char *fresh(const char *name)
{
    static char dir[400];
    snprintf(dir, sizeof dir, "%s", temp_path("%s", name));
    (void)sys_remove_tree(dir);
    return dir;
}

TEST(crc32_known_values)
{
    struct crc32_tables *t = malloc(sizeof *t);
    crc32_prepare(t);
    CHECK(crc32_extend(t, 0, "123456789", 9) == 0xcbf43926u);
    CHECK(crc32_extend(t, 0, "", 0) == 0);
    unsigned char bytes[1000];
    for (int i = 0; i < 1000; i++) bytes[i] = (unsigned char)(i * 7);
    uint32_t whole = crc32_extend(t, 0, bytes, 1000);
    for (size_t cut = 0; cut <= 1000; cut += 13)
        CHECK(crc32_extend(t, crc32_extend(t, 0, bytes, cut), bytes + cut, 1000 - cut) == whole);
    free(t);
}

/* Folding against the tables, for every length and start around its blocks; joined sums. */
TEST(crc32_folded_and_joined)
{
    struct crc32_tables *t = malloc(sizeof *t), *plain = malloc(sizeof *t);
    enum { N = 3000 };
    static unsigned char bytes[N];
    uint64_t x = test_seed() | 1;
    for (int i = 0; i < N; i++) bytes[i] = (unsigned char)((x = x * 6364136223846793005u + 1) >> 56);
    crc32_prepare(t);
    crc32_prepare(plain);
    memset(plain->fold, 0, sizeof plain->fold);
    printf("# folding is %s\n", t->fold[0] ? "compared" : "not there");
    for (size_t n = 0; n < 1200; n++) {
        size_t at = n * 7 % 64;
        uint32_t begin = n % 3 ? (uint32_t)(n * 2654435761u) : 0;
        CHECK(crc32_extend(t, begin, bytes + at, n) == crc32_extend(plain, begin, bytes + at, n));
    }
    uint32_t whole = crc32_extend(plain, 0, bytes, N);
    for (size_t cut = 0; cut <= N; cut += 37) {
        uint32_t a = crc32_extend(t, 0, bytes, cut), b = crc32_extend(t, 0, bytes + cut, N - cut);
        CHECK(crc32_join(a, b, N - cut) == whole);
    }
    /* lengths beyond 32 bits: zeros, in two ways */
    uint32_t zeros = 0;
    for (int i = 0; i < 33; i++) zeros = i ? crc32_join(zeros, zeros, 1ull << (i - 1))
                                           : crc32_extend(t, 0, "", 1);
    CHECK(crc32_join(crc32_join(whole, zeros, 1ull << 32), zeros, 1ull << 32) ==
          crc32_join(whole, crc32_join(zeros, zeros, 1ull << 32), 1ull << 33));
    free(t);
    free(plain);
}

TEST(manifest_round_trip)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("round");
    char *path, *note;
    uint64_t step;
    /* no folder at all */
    CHECK(manifest_newest(dir, &path, &step, &note, &err) == STK_END && path == NULL &&
          note == NULL);
    CHECK_OK(save(dir, 100, 1, &err), &err);
    CHECK_OK(save(dir, 99, 2, &err), &err);
    CHECK(newest_is(dir, 100, 1));
    CHECK_OK(manifest_newest(dir, &path, &step, NULL, &err), &err);
    json_t *doc;
    CHECK_OK(manifest_read(path, true, &doc, &err), &err);
    CHECK(json_integer_value(json_object_get(doc, "step")) == 100 &&
          json_integer_value(json_object_get(doc, "version")) == MANIFEST_VERSION);
    CHECK(json_real_value(json_object_get(doc, "loss_scale")) == 0.5);
    CHECK(json_integer_value(json_object_get(json_object_get(doc, "client"), "epoch")) == 3);
    CHECK(json_object_size(json_object_get(doc, "files")) == 2);
    CHECK(strstr(path, "/step-00000100") != NULL);
    json_decref(doc);
    sys_free(path);
    CHECK_OK(save(dir, 12345678901, 3, &err), &err); /* more digits than are padded */
    CHECK(newest_is(dir, 12345678901, 3));
}

TEST(manifest_same_step_is_replaced)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("replace");
    CHECK_OK(save(dir, 5, 1, &err), &err);
    CHECK_OK(save(dir, 5, 2, &err), &err);
    CHECK(newest_is(dir, 5, 2));
    CHECK(!temp_exists(in(dir, ".old-step-00000005")) &&
          !temp_exists(in(dir, ".partial-step-00000005")));
}

TEST(manifest_ckp_17_leftovers_of_killed_runs)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("leftovers");
    CHECK_OK(save(dir, 5, 1, &err), &err);
    char *partial;
    CHECK_OK(manifest_begin(dir, 6, &partial, &err), &err); /* killed here */
    temp_text(in(partial, "state-00001.safetensors"), "half");
    sys_free(partial);
    CHECK(newest_is(dir, 5, 1));
    CHECK_OK(save(dir, 6, 2, &err), &err); /* same step again */
    CHECK(newest_is(dir, 6, 2));
    /* Killed between the two renames of a replacement: the former one is found, and comes back. */
    char from[600], to[600];
    snprintf(from, sizeof from, "%s", in(dir, "step-00000006"));
    snprintf(to, sizeof to, "%s", in(dir, ".old-step-00000006"));
    CHECK(rename(from, to) == 0);
    CHECK(newest_is(dir, 6, 2));
    CHECK_OK(manifest_begin(dir, 7, &partial, &err), &err);
    CHECK(temp_exists(from) && !temp_exists(to));
    manifest_abandon(partial);
    CHECK(!temp_exists(partial));
    sys_free(partial);
    manifest_abandon(NULL);
    CHECK(newest_is(dir, 6, 2));
    /* Names that only look alike. */
    CHECK(sys_mkdirs(in(dir, "step-9")) == 0 && sys_mkdirs(in(dir, "step-0000000x")) == 0 &&
          sys_mkdirs(in(dir, "step-000000099")) == 0);
    CHECK(newest_is(dir, 6, 2));
}

/* Every file of the newest cut at every 1/20 of its length: refused with a sentence, and the one
 * before is found. */
TEST(manifest_ckp_07_cut_at_every_twentieth)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("cut");
    CHECK_OK(save(dir, 1, 10, &err), &err);
    CHECK_OK(save(dir, 2, 20, &err), &err);
    char folder[600];
    snprintf(folder, sizeof folder, "%s", in(dir, "step-00000002"));
    static const char *const names[] = { "manifest.json", "state-00001.safetensors",
                                         "state-00002.safetensors" };
    for (int i = 0; i < 3; i++) {
        size_t size;
        char *bytes = temp_read(in(folder, names[i]), &size);
        for (size_t k = 0; k < 20; k++) {
            temp_write(in(folder, names[i]), bytes, size * k / 20);
            json_t *doc;
            stk_error_clear(&err);
            CHECK(manifest_read(folder, false, &doc, &err) != STK_OK && doc == NULL &&
                  strstr(err.text, names[i]));
            CHECK(newest_is(dir, 1, 10));
        }
        CHECK(unlink(in(folder, names[i])) == 0);
        CHECK(newest_is(dir, 1, 10));
        temp_write(in(folder, names[i]), bytes, size);
        CHECK(newest_is(dir, 2, 20));
        free(bytes);
    }
}

TEST(manifest_one_changed_bit_is_found)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("bits");
    CHECK_OK(save(dir, 1, 10, &err), &err);
    CHECK_OK(save(dir, 2, 20, &err), &err);
    char folder[600];
    snprintf(folder, sizeof folder, "%s", in(dir, "step-00000002"));
    static const char *const names[] = { "manifest.json", "state-00002.safetensors" };
    for (int i = 0; i < 2; i++) {
        size_t size;
        char *bytes = temp_read(in(folder, names[i]), &size);
        for (size_t k = 0; k < size; k++) {
            char before = bytes[k];
            /* white space between JSON tokens is not summed */
            if (before == ' ' || before == '\n') continue;
            bytes[k] = (char)(before ^ 1);
            temp_write(in(folder, names[i]), bytes, size);
            json_t *doc;
            CHECK(manifest_read(folder, true, &doc, NULL) != STK_OK);
            bytes[k] = before;
        }
        temp_write(in(folder, names[i]), bytes, size);
        free(bytes);
    }
    CHECK(newest_is(dir, 2, 20));
}

TEST(manifest_refuses_other_documents)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("other");
    CHECK_OK(save(dir, 1, 10, &err), &err);
    json_t *doc;
    char folder[600];
    snprintf(folder, sizeof folder, "%s", in(dir, "step-00000001"));
    temp_text(in(folder, "manifest.json"), "{\"format\":\"something\"}");
    CHECK(manifest_read(folder, true, &doc, &err) == STK_ERR_FORMAT &&
          strstr(err.text, "not that of a checkpoint"));
    stk_error_clear(&err);
    temp_text(in(folder, "manifest.json"), "{\"format\":\"stoker-checkpoint\",\"version\":99}");
    CHECK(manifest_read(folder, true, &doc, &err) == STK_ERR_FORMAT &&
          strstr(err.text, "version 99, this program reads version 1"));
    CHECK(manifest_read(temp_path("absent"), true, &doc, NULL) == STK_ERR_IO);
    /* A copy under another step's name is not that step. */
    CHECK_OK(save(dir, 1, 10, &(struct stk_error){ 0 }), &err);
    CHECK(rename(folder, in(dir, "step-00000009")) == 0);
    char *path, *note;
    uint64_t step;
    CHECK(manifest_newest(dir, &path, &step, &note, &err) == STK_END &&
          strstr(note, "of another step"));
    sys_free(note);
}

TEST(manifest_prune_keeps_the_newest_complete)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("prune");
    for (uint64_t i = 1; i <= 6; i++) CHECK_OK(save(dir, i, (float)i, &err), &err);
    CHECK(truncate(in(dir, "step-00000006/state-00001.safetensors"), 3) == 0);
    char *partial;
    CHECK_OK(manifest_begin(dir, 7, &partial, &err), &err);
    sys_free(partial);
    CHECK_OK(manifest_prune(dir, 0, &err), &err);
    CHECK(!temp_exists(in(dir, ".partial-step-00000007")) && temp_exists(in(dir, "step-00000001")));
    CHECK_OK(manifest_prune(dir, 2, &err), &err);
    /* the damaged 6 does not count */
    CHECK(temp_exists(in(dir, "step-00000005")) && temp_exists(in(dir, "step-00000004")));
    CHECK(!temp_exists(in(dir, "step-00000003")) && !temp_exists(in(dir, "step-00000001")));
    CHECK(newest_is(dir, 5, 5));
    CHECK_OK(manifest_prune(fresh("nothing"), 2, &err), &err);
}

/* The n-th write, flush, rename, open ... fails, once or for ever, during a new step and during a
 * replacement: the save says so, nothing half-made loads, and what was complete before still does.
 * */
static void fail_everywhere(uint64_t step, uint64_t times)
{
    static const struct {
        enum sys_call kind;
        int os_errno;
    } kinds[] = {
        { SYS_WRITE, ENOSPC }, { SYS_FSYNC, EIO }, { SYS_RENAME, EIO },   { SYS_ALLOCATE, ENOSPC },
        { SYS_OPEN, EMFILE },  { SYS_READ, EIO },  { SYS_ALLOC, ENOMEM },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        bool done = false;
        for (uint64_t k = 1; !done && k < 1000; k++) {
            struct stk_error err = { 0 };
            const char *dir = fresh("faults");
            CHECK_OK(save(dir, 1, 10, &err), &err);
            uint64_t alive = sys_alloc_bytes();
            sys_fault_arm(kinds[i].kind, k, times, kinds[i].os_errno);
            stk_status status = save(dir, step, 20, &err);
            done = sys_fault_seen(kinds[i].kind) < k;
            sys_fault_arm(kinds[i].kind, 0, 0, 0);
            CHECK(done == (status == STK_OK) && sys_alloc_bytes() == alive);
            CHECK(done || err.text[0]);
            if (kinds[i].os_errno == ENOSPC && !done) CHECK(status == STK_ERR_NOSPACE);
            uint64_t found = 0;
            float value = 0;
            CHECK(newest(dir, &found, &value)); /* always one, and always whole */
            bool is_new = found == step && value == 20, is_before = found == 1 && value == 10;
            /* If the flush of the folder after the rename fails (which also opens it), the new
             * one is in place. */
            bool late = kinds[i].kind == SYS_FSYNC || kinds[i].kind == SYS_OPEN;
            CHECK(status == STK_OK ? is_new : is_before || (late && is_new));
            stk_error_clear(&err);
            CHECK_OK(save(dir, step, 30, &err), &err); /* the next attempt works (CKP-17) */
            CHECK(newest_is(dir, step, 30));
        }
        CHECK(done);
    }
}

TEST(manifest_ckp_16_every_failing_call_of_a_new_step) { fail_everywhere(2, 1); }
TEST(manifest_ckp_16_every_failing_call_of_a_replacement) { fail_everywhere(1, 1); }
TEST(manifest_ckp_37_disk_stays_full) { fail_everywhere(2, UINT64_MAX); }
TEST(manifest_ckp_37_disk_stays_full_at_a_replacement) { fail_everywhere(1, UINT64_MAX); }

/* A child saves step after step and is killed at some instant, 100 times: whatever the instant,
 * the newest checkpoint is whole and not older than the one that was there when the child began.
 * */
TEST(manifest_ckp_16_killed_while_saving)
{
    struct stk_error err = { 0 };
    const char *dir = fresh("killed");
    struct rng r;
    rng_seed(&r, test_seed());
    CHECK_OK(save(dir, 1, 1, &err), &err);
    uint64_t last = 1;
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            /* the first replaces */
            for (uint64_t step = last; step < last + 1000; step++)
                (void)save(dir, step, (float)step, NULL);
            _exit(0);
        }
        struct timespec wait = { 0, (long)rng_below(&r, 2000000) };
        nanosleep(&wait, NULL);
        kill(child, SIGKILL);
        CHECK(waitpid(child, NULL, 0) == child);
        uint64_t step = 0;
        float value = 0;
        REQUIRE(newest(dir, &step, &value));
        CHECK(step >= last && value == (float)step);
        last = step;
        CHECK_OK(manifest_prune(dir, 2, &err), &err);
    }
}

TEST_MAIN()
