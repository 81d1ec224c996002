/* tests/base/tree.h - a captured tree of /proc and /sys, made by a test. */
#ifndef TESTS_BASE_TREE_H
#define TESTS_BASE_TREE_H

#include "base/sys.h"
#include "tests/test.h"

#include <fcntl.h>

struct tree { char root[256]; };

static inline bool tree_new(struct tree *t)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(t->root, sizeof t->root, "%s/stoker-tree-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(t->root) != NULL;
}

static inline void tree_end(struct tree *t) { sys_remove_tree(t->root); }

static inline void tree_put(const struct tree *t, const char *path, const char *text)
{
    char full[1024];
    snprintf(full, sizeof full, "%s/%s", t->root, path);
    char *slash = strrchr(full, '/');
    *slash = '\0';
    CHECK(sys_mkdirs(full) == 0);
    *slash = '/';
    int fd = sys_open(full, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && sys_write_full(fd, text, strlen(text), 0) == (int64_t)strlen(text));
    sys_close(fd);
}

#endif
