/* tests/nvme/netfs.h - a file system as the worse network ones are, in the memory of a process of the
 * test's own: FUSE without a library.
 *
 * What it has of them: open with O_DIRECT is refused (EINVAL), fallocate and nameless files are not
 * there, and a file that is removed while it is open becomes a `.netfs...` beside it until the last
 * descriptor is closed, so that its folder cannot be removed until then (NFS's "silly rename"). What it
 * has not: a server that goes away, another machine. */
#ifndef TESTS_NVME_NETFS_H
#define TESTS_NVME_NETFS_H

#include <sys/types.h>

/* Mounts on `folder` and serves in a child until that is unmounted or the child killed. The child, or
 * -1: no FUSE or no mounts here. */
pid_t netfs_start(const char *folder);
/* Unmounts and waits for the child. 0, or what was wrong: errno of the unmount. */
int netfs_end(const char *folder, pid_t pid);
/* In this process: mounts, prints "ready", serves until the end. Returns the exit code; 77: no FUSE. */
int netfs_main(const char *folder);

#endif
