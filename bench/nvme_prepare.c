/* bench/nvme_prepare.c - looks at the paths before anything is written, refuses what cannot work,
 * and says what will be done: bytes written to each drive (wear), how long.
 *
 * Owns: these refusals and this text. Must not know: how a point is measured. Application's
 * thread. */
#include "bench/nvme_impl.h"
#include "base/mem.h"
#include "base/sys.h"
#include "base/topology.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (1ull << 20)

const char *nvme_mode_name(enum measure_mode m)
{
    static const char *const names[] = { "read", "write", "mixed", "optimizer" };
    return names[m];
}

char *nvme_size_text(uint64_t bytes, char *buf, size_t buf_bytes)
{
    if (bytes >= MIB && bytes % MIB == 0)
        snprintf(buf, buf_bytes, "%llu MiB", (unsigned long long)(bytes / MIB));
    else
        snprintf(buf, buf_bytes, "%llu KiB", (unsigned long long)(bytes >> 10));
    return buf;
}

bool nvme_stopped(const struct nvme_bench *b) { return b->stop && atomic_load(b->stop); }

void nvme_note(struct nvme_bench *b, const char *fmt, ...)
{
    va_list args;
    uint32_t at = b->n_notes < 16 ? b->n_notes : 15;
    va_start(args, fmt);
    vsnprintf(b->note[at], sizeof b->note[at], fmt, args);
    va_end(args);
    b->n_notes = at + 1;
    printf("note       %s\n", b->note[at]);
}

static bool one_point(const struct nvme_bench *b) { return b->o.block_bytes || b->o.depth; }

bool nvme_rotates(const struct drive_facts *d)
{
    return d->rotational && strncmp(d->under, "vd", 2) != 0 && strncmp(d->device, "loop", 4) != 0;
}

/* A loop device keeps what it reads of its file in the page cache unless told not to. */
static bool loop_is_cached(const struct drive_facts *d)
{
    char name[128], text[8] = "";
    if (strncmp(d->device, "loop", 4) != 0) return false;
    snprintf(name, sizeof name, "/sys/block/%s/loop/dio", d->device);
    int fd = sys_open(name, 0, 0);
    if (fd < 0) return false;
    int64_t n = sys_read_some(fd, text, sizeof text - 1, 0);
    sys_close(fd);
    return n > 0 && text[0] == '0';
}

static stk_status check_folder(const char *path, struct stk_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: %s; name folders that exist", path,
                             strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return stk_error_set(err, STK_ERR_IO, ENOTDIR,
                             "%s: is no folder; measuring writes files, so name a folder on the "
                             "drive",
                             path);
    if (access(path, W_OK | X_OK) != 0)
        return stk_error_set(err, STK_ERR_IO, errno, "%s: files cannot be made there: %s", path,
                             strerror(errno));
    return STK_OK;
}

/* Files of one file system share what is free there: together they are open at once. */
static stk_status check_room(const struct nvme_bench *b, uint32_t i, struct stk_error *err)
{
    char need_text[32], free_text[32];
    uint64_t least = b->o.size_bytes ? b->o.size_bytes
                                     : 4 * (b->o.block_bytes > MIB ? b->o.block_bytes : 8 * MIB);
    uint64_t need = 0;
    for (uint32_t k = 0; k < b->n_paths; k++)
        if (b->drive[k].device_id == b->drive[i].device_id) need += least;
    if (need <= b->free_bytes[i]) return STK_OK;
    mem_size_format(need, need_text);
    mem_size_format(b->free_bytes[i], free_text);
    return stk_error_set(err, STK_ERR_NOSPACE, ENOSPC,
                         "%s: %s are needed, %s are free; make room%s", b->path[i], need_text,
                         free_text, b->o.size_bytes ? " or lower --size" : "");
}

static stk_status check_twice(const struct nvme_bench *b, uint32_t i, struct stk_error *err)
{
    struct stat here, there;
    if (stat(b->path[i], &here) != 0) return STK_OK;
    for (uint32_t k = 0; k < i; k++)
        if (stat(b->path[k], &there) == 0 && here.st_dev == there.st_dev &&
            here.st_ino == there.st_ino)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "%s and %s are the same folder: name each once", b->path[k],
                                 b->path[i]);
    return STK_OK;
}

/* An output that cannot be written is known before the work. */
static stk_status check_output(const char *option, const char *file, struct stk_error *err)
{
    struct stat st;
    if (!file) return STK_OK;
    if (stat(file, &st) == 0) {
        if (S_ISDIR(st.st_mode) || access(file, W_OK) != 0)
            return stk_error_set(err, STK_ERR_IO, errno, "--%s %s: cannot be written: %s", option,
                                 file, S_ISDIR(st.st_mode) ? "it is a folder" : strerror(errno));
        return STK_OK;
    }
    const char *slash = strrchr(file, '/');
    char *parent = slash ? sys_format("%.*s", (int)(slash - file + 1), file) : sys_strdup(".");
    stk_status status = STK_OK;
    if (!parent || access(parent, W_OK | X_OK) != 0 || !*file)
        status = stk_error_set(err, STK_ERR_IO, errno, "--%s %s: cannot be written: %s", option,
                               file, *file ? strerror(errno) : "the name is empty");
    sys_free(parent);
    return status;
}

bool nvme_far(const struct topology *t, int numa_node)
{
    bool near = numa_node < 0;
    for (uint32_t k = 0; k < t->n_nodes; k++) near |= t->node[k].os == (uint32_t)numa_node;
    return !near;
}

/* Reads from a drive of another node cross the sockets' link, and buffers lie on ours. */
static void warn_of_nodes(struct nvme_bench *b)
{
    struct topology *t;
    if (topology_open("", &t, NULL) != STK_OK) return;
    for (uint32_t i = 0; i < b->n_paths; i++)
        if (nvme_far(t, b->drive[i].numa_node))
            nvme_note(b, "%s: the drive is on NUMA node %d, and this process may use no core of it: every "
                         "transfer goes to another node (`numactl --cpunodebind=%d`, or a wider cpuset)",
                      b->path[i], b->drive[i].numa_node, b->drive[i].numa_node);
    topology_close(t);
}

static void warn_of_paths(struct nvme_bench *b)
{
    warn_of_nodes(b);
    for (uint32_t i = 0; i < b->n_paths; i++) {
        if (b->loop_cached[i])
            nvme_note(b, "%s: %s keeps its file in the page cache: no result will be valid "
                         "(`losetup --direct-io=on /dev/%s` ends that)",
                      b->path[i], b->drive[i].device, b->drive[i].device);
        for (uint32_t k = 0; k < i; k++) {
            bool same = b->drive[i].device_id == b->drive[k].device_id ||
                        (b->drive[i].under[0] &&
                         strcmp(b->drive[i].under, b->drive[k].under) == 0);
            if (!same) continue;
            nvme_note(b, "%s and %s share a drive: together they are no faster than one",
                      b->path[k], b->path[i]);
            break;
        }
    }
}

static double default_time(const struct nvme_bench *b)
{
    uint32_t n_modes = 0;
    for (int k = 0; k < NVME_MODES; k++) n_modes += b->mode[k];
    if (one_point(b) && !b->o.sustained)
        return b->n_units * n_modes * (double)b->o.pairs * (b->fio.usable ? 4.5 : 2);
    return 80 + (b->o.sustained ? 300.0 * b->n_units : 0);
}

static void make_units(struct nvme_bench *b)
{
    b->n_units = b->n_paths > 1 ? b->n_paths + 1 : 1;
    for (uint32_t i = 0; i < b->n_paths; i++) {
        b->unit[i].path[0] = i;
        b->unit[i].n_paths = 1;
        b->unit[b->n_units - 1].path[i] = i;
    }
    b->unit[b->n_units - 1].n_paths = b->n_paths;
}

stk_status nvme_prepare(struct nvme_bench *b, struct stk_error *err)
{
    STK_TRY(check_output("json", b->o.json, err));
    STK_TRY(check_output("html", b->o.html, err));
    struct stat json, html;
    if (b->o.json && b->o.html &&
        (strcmp(b->o.json, b->o.html) == 0 ||
         (stat(b->o.json, &json) == 0 && stat(b->o.html, &html) == 0 && S_ISREG(json.st_mode) &&
          json.st_dev == html.st_dev && json.st_ino == html.st_ino)))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--json and --html both name %s: give each its own file", b->o.html);
    for (uint32_t i = 0; i < b->n_paths; i++) {
        STK_TRY(check_folder(b->path[i], err));
        STK_TRY(check_twice(b, i, err));
        STK_TRY(drive_facts_read(b->path[i], "/sys", &b->drive[i], err));
        int64_t room = sys_disk_free(b->path[i]);
        if (room < 0)
            return stk_error_set(err, STK_ERR_IO, errno, "%s: %s", b->path[i], strerror(errno));
        b->free_bytes[i] = (uint64_t)room;
        b->loop_cached[i] = loop_is_cached(&b->drive[i]);
    }
    for (uint32_t i = 0; i < b->n_paths; i++) STK_TRY(check_room(b, i, err));
    if (!b->o.no_fio) nvme_fio_find(&b->fio);
    make_units(b);
    b->time_s = b->time_given ? b->o.time_s : default_time(b);
    if (b->o.write_max_bytes == 0) b->o.write_max_bytes = (b->o.sustained ? 400ull : 64ull) << 30;
    warn_of_paths(b);
    return STK_OK;
}

/* --- the announcement ------------------------------------------------------------------------- */

static void announce_path(const struct nvme_bench *b, uint32_t i)
{
    const struct drive_facts *d = &b->drive[i];
    char size[32];
    printf("path       %s: %s", b->path[i], d->device[0] ? d->device : "no block device");
    if (d->under[0] && strcmp(d->under, d->device) != 0) printf(" on %s", d->under);
    if (d->model[0]) printf(" (%s)", d->model);
    printf(", %s, %s free", d->file_system[0] ? d->file_system : "unknown file system",
           mem_size_format(b->free_bytes[i], size));
    if (d->numa_node >= 0) printf(", NUMA node %d", d->numa_node);
    if (d->link_bytes_per_s > 0) printf(", link %.2f GB/s", d->link_bytes_per_s / 1e9);
    if (nvme_rotates(d)) printf(", rotating");
    printf("\n");
    if (d->smart)
        printf("           %d C, %u %% of its endurance used, %.1f TB written in its life%s\n",
               d->temperature_c, d->percentage_used, d->written_bytes / 1e12,
               d->critical_warning ? ", CRITICAL WARNING set" : "");
    else
        printf("           wear and temperature: %s\n", d->smart_why);
}

void nvme_announce(const struct nvme_bench *b)
{
    char size[32];
    for (uint32_t i = 0; i < b->n_paths; i++) announce_path(b, i);
    printf("time       about %.0f s: %s\n", b->time_s,
           b->n_paths > 1 ? "each path alone, then all together"
           : one_point(b) ? "one point" : "sweep, points, burst and sustained");
    printf("wear       at most %s are written to each path (--write-max); the files have no name "
           "or are removed\n",
           mem_size_format(b->o.write_max_bytes, size));
    printf("beside it  %s\n", b->o.no_fio ? "nothing (--no-fio)"
                              : b->fio.usable ? b->fio.version : b->fio.why);
    if (b->o.verify)
        printf("verify     every block carries file, offset and pass, and is checked; rates "
               "include that\n");
    printf("\n");
    fflush(stdout);
}
