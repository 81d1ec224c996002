/* nvme/io_uring_none.c - stands in for io_uring.c where liburing was absent at build time
 * (nvme/meson.build chooses). */
#include "nvme/io_impl.h"

static stk_status none_open(struct io *io, struct stk_error *err)
{
    return stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                         "io_uring is not in this build: liburing was absent when it was "
                         "configured; install liburing-dev and build "
                         "again, or use the posix backend");
}

const struct io_backend io_backend_uring = { .name = "io_uring", .open = none_open };
