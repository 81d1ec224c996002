/* base/cgroup.h - private to base/: small files of /proc and /sys, and the chain of cgroup folders
 * above this process.
 *
 * `root` is "" for this machine or the root of a captured tree (tests); below it lie
 * proc/self/cgroup and sys/fs/cgroup.
 * Sources: cgroups(7); the kernel's admin-guide/cgroup-v1 and admin-guide/cgroup-v2. Any thread. */
#ifndef BASE_CGROUP_H
#define BASE_CGROUP_H

#include "base/status.h"

#define CGROUP_FILE_MAX 16384

/* Reads at most CGROUP_FILE_MAX - 1 bytes of `root``path` into buf[CGROUP_FILE_MAX], terminated.
 * False: unreadable. */
bool cgroup_read_text(const char *root, const char *path, char *buf);

/* The number after `key` at the start of a line ("MemTotal:   123 kB"). False: no such line. */
bool cgroup_find_number(const char *text, const char *key, uint64_t *out);

/* One number in a file of a cgroup folder; UINT64_MAX for "max" or a negative number. False: no
 * such file. */
bool cgroup_read_number(const char *root, const char *dir, const char *file, uint64_t *out);

/* Calls visit(root, dir, v2, arg) for each folder of `controller` that may exist, from this
 * process's own up to the top, version 1 and 2. Folders that do not exist are visited too (a
 * container sees the host's path): reads there fail. */
void cgroup_walk(const char *root, const char *controller,
                 void (*visit)(const char *root, const char *dir, bool v2, void *arg), void *arg);

#endif
