/* tests/engine/save_world.h - what the tests of checkpoints under way share: folders in memory where
 * there are some (hundreds of checkpoints, each flushed), and comparing two checkpoints file by
 * file. */
#ifndef TESTS_ENGINE_SAVE_WORLD_H
#define TESTS_ENGINE_SAVE_WORLD_H

#include "base/sys.h"
#include "tests/test.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char save_root[64];

static inline void save_remove_root(void)
{
    if (save_root[0]) sys_remove_tree(save_root);
}

/* `buf`: a folder of this name for checkpoints; what was there is removed. */
static inline const char *save_dir(const char *name, char buf[256])
{
    if (!save_root[0]) {
        bool memory = access("/dev/shm", W_OK | X_OK) == 0;
        snprintf(save_root, sizeof save_root, "%s/stoker-save-XXXXXX", memory ? "/dev/shm" : "/tmp");
        if (!mkdtemp(save_root)) abort();
        atexit(save_remove_root);
    }
    snprintf(buf, 256, "%s/%s", save_root, name);
    sys_remove_tree(buf);
    return buf;
}

static inline bool save_same_file(const char *a, const char *b)
{
    FILE *f = fopen(a, "re"), *g = fopen(b, "re");
    static char x[65536], y[65536];
    bool same = f && g;
    while (same) {
        size_t n = fread(x, 1, sizeof x, f), m = fread(y, 1, sizeof y, g);
        same = n == m && !memcmp(x, y, n);
        if (n == 0) break;
    }
    if (f) fclose(f);
    if (g) fclose(g);
    return same;
}

/* Every file of the checkpoint of `step` in a is in b, with the same bytes, and nothing else is. */
static inline bool save_same(const char *a, const char *b, uint64_t step)
{
    char x[300], y[300], p[600], q[600];
    uint32_t files = 0;
    int balance = 0;
    snprintf(x, sizeof x, "%s/step-%08llu", a, (unsigned long long)step);
    snprintf(y, sizeof y, "%s/step-%08llu", b, (unsigned long long)step);
    for (int side = 0; side < 2; side++) {
        DIR *d = opendir(side ? y : x);
        if (!d) return false;
        for (struct dirent *e; (e = readdir(d));) {
            if (e->d_name[0] == '.') continue;
            balance += side ? -1 : 1;
            files += !side;
            snprintf(p, sizeof p, "%s/%s", x, e->d_name);
            snprintf(q, sizeof q, "%s/%s", y, e->d_name);
            if (side || save_same_file(p, q)) continue;
            printf("# %s and %s differ\n", p, q);
            closedir(d);
            return false;
        }
        closedir(d);
    }
    return balance == 0 && files >= 2;
}

/* Folders in `dir`: complete checkpoints, or with `hidden` what is not. */
static inline int save_count(const char *dir, bool hidden)
{
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            n += (e->d_name[0] == '.') == hidden;
    if (d) closedir(d);
    return n;
}

#endif
