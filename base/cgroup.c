/* base/cgroup.c - finds the cgroup folders that limit this process.
 *
 * Owns: nothing. Must not know: what is read from the folders (mem_limits.c, cpu.c do).
 * Thread: any; reads small files. */
#include "base/cgroup.h"
#include "base/sys.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool cgroup_read_text(const char *root, const char *path, char *buf)
{
    char full[PATH_MAX];
    int n = snprintf(full, sizeof full, "%s%s", root ? root : "", path);
    buf[0] = '\0';
    if (n < 0 || (size_t)n >= sizeof full) return false;
    int fd = sys_open(full, O_RDONLY, 0);
    if (fd < 0) return false;
    int64_t got = sys_read_full(fd, buf, CGROUP_FILE_MAX - 1, 0);
    sys_close(fd);
    buf[got > 0 ? got : 0] = '\0';
    return got >= 0;
}

bool cgroup_find_number(const char *text, const char *key, uint64_t *out)
{
    size_t n = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        if (*line == '\n') line++;
        /* the whole word: "active_file" must not find "active_file_x" */
        if (strncmp(line, key, n) != 0 || (line[n] != ' ' && line[n] != '\t')) continue;
        char *end;
        const char *digits = line + n + strspn(line + n, " \t");
        *out = strtoull(digits, &end, 10);
        return end != digits;
    }
    return false;
}

bool cgroup_read_number(const char *root, const char *dir, const char *file, uint64_t *out)
{
    char path[PATH_MAX], text[CGROUP_FILE_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    if (n < 0 || (size_t)n >= sizeof path || !cgroup_read_text(root, path, text)) return false;
    if (strncmp(text, "max", 3) == 0 || text[0] == '-') {
        *out = UINT64_MAX;
        return true;
    }
    char *end;
    *out = strtoull(text, &end, 10);
    return end != text;
}

/* From `path` to "/": each folder below `mount`. */
static void walk_up(const char *root, const char *mount, const char *path, bool v2,
                    void (*visit)(const char *, const char *, bool, void *), void *arg)
{
    char dir[PATH_MAX];
    /* outside of our cgroup namespace the path climbs with "..": only the top is ours to see */
    if (strstr(path, "..")) path = "/";
    int n = snprintf(dir, sizeof dir, "%s%s", mount, path);
    if (n < 0 || (size_t)n >= sizeof dir) return;
    size_t top = strlen(mount);
    for (;;) {
        size_t len = strlen(dir);
        while (len > top && dir[len - 1] == '/') dir[--len] = '\0';
        visit(root, dir, v2, arg);
        if (len <= top) return;
        *strrchr(dir, '/') = '\0';
    }
}

/* Whether `name` is one of the comma-separated `list`. */
static bool has_word(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; at; at = strchr(at, ',')) {
        if (*at == ',') at++;
        if (strncmp(at, name, n) == 0 && (at[n] == '\0' || at[n] == ',')) return true;
    }
    return false;
}

void cgroup_walk(const char *root, const char *controller,
                 void (*visit)(const char *root, const char *dir, bool v2, void *arg), void *arg)
{
    char text[CGROUP_FILE_MAX], mount[PATH_MAX];
    if (!cgroup_read_text(root, "/proc/self/cgroup", text)) return;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        /* number:controllers:path; version 2 is the line "0::path" */
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0';
        list++;
        if (*list == '\0') {
            walk_up(root, "/sys/fs/cgroup", path, true, visit, arg);
            walk_up(root, "/sys/fs/cgroup/unified", path, true, visit, arg);
        } else if (has_word(list, controller)) {
            snprintf(mount, sizeof mount, "/sys/fs/cgroup/%s", controller);
            walk_up(root, mount, path, false, visit, arg);
            if (strcmp(list, controller) == 0) continue;
            snprintf(mount, sizeof mount, "/sys/fs/cgroup/%s", list);
            walk_up(root, mount, path, false, visit, arg);
        }
    }
}
