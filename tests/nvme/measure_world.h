/* tests/nvme/measure_world.h - a measurement on a simulated disk in virtual time, or on real files
 * in a folder that goes. */
#ifndef TESTS_NVME_MEASURE_WORLD_H
#define TESTS_NVME_MEASURE_WORLD_H

#include "tests/nvme/world.h"
#include "nvme/measure.h"
#include "nvme/measure_store.h"

#include <dirent.h>

#define KIB 1024u
#define MIB (1024u * 1024u)
#define MS 1000000u

struct mworld {
    struct exec *ex;
    struct io_sim_disk *disk;
    struct io_sim_cfg sim;
    struct measure_cfg cfg;
    char dir[512];
    struct stk_error err;
    struct measure_result r;
};

/* Reads at 1 GB/s, writes at 500 MB/s, 100 us: one file of 8 MiB. */
static inline bool mworld_sim(struct mworld *w)
{
    memset(w, 0, sizeof *w);
    if (exec_open_sim(test_seed(), &w->ex, &w->err) != STK_OK ||
        io_sim_disk_new(1ull << 40, &w->disk, &w->err) != STK_OK)
        return false;
    w->sim = (struct io_sim_cfg){ .disk = w->disk,
                                  .seed = test_seed(),
                                  .latency_ns = 100000,
                                  .read_bytes_per_s = 1e9,
                                  .write_bytes_per_s = 5e8 };
    w->cfg = (struct measure_cfg){ .paths = { "/sim" },
                                   .n_paths = 1,
                                   .file_bytes = 8 * MIB,
                                   .kind = IO_SIM,
                                   .block_bytes = 64 * KIB,
                                   .depth = 8,
                                   .seed = test_seed(),
                                   .ramp_ns = 10 * MS,
                                   .run_ns = 100 * MS,
                                   .sim = &w->sim,
                                   .ex = w->ex };
    return true;
}

static inline bool mworld_real(struct mworld *w, enum io_kind kind)
{
    memset(w, 0, sizeof *w);
    w->cfg = (struct measure_cfg){ .paths = { w->dir },
                                   .n_paths = 1,
                                   .file_bytes = 8 * MIB,
                                   .kind = kind,
                                   .block_bytes = 64 * KIB,
                                   .depth = 8,
                                   .seed = test_seed(),
                                   .run_ns = 10000ull * MS,
                                   .bytes_max = 16 * MIB };
    return world_dir(w->dir, sizeof w->dir);
}

static inline uint32_t entries_of(const char *dir)
{
    uint32_t n = 0;
    DIR *d = opendir(dir);
    struct dirent *e;
    while (d && (e = readdir(d))) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

/* Nothing of a measurement may be left. */
static inline void mworld_close(struct mworld *w)
{
    if (w->dir[0]) {
        CHECK(entries_of(w->dir) == 0);
        sys_remove_tree(w->dir);
    }
    if (w->disk) CHECK(io_sim_free_bytes(w->disk) == 1ull << 40);
    exec_close(w->ex);
    io_sim_disk_free(w->disk);
}

static inline bool near(double got, double want, double share)
{
    bool ok = got > want * (1 - share) && got < want * (1 + share);
    if (!ok) printf("# %g where %g was expected\n", got, want);
    return ok;
}

#endif
