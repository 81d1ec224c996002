/* bench/nvme_verdict.c - what limits this storage, what to change, what `train` will do with it and
 * how long a step takes.
 *
 * Owns: the judgement. Must not know: how anything was measured or is shown; pure (BEN-02: a
 * verdict says which limit it is, and with which command it is raised). Any thread. */
#include "bench/nvme_impl.h"
#include "base/mem.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

const char *nvme_limit_name(enum nvme_limit l)
{
    static const char *const names[] = { "unknown",  "device link", "drive",
                                         "processor", "settings",    "page cache" };
    return names[l];
}

static __attribute__((format(printf, 2, 3))) void change(struct nvme_verdict *v, const char *fmt,
                                                         ...)
{
    va_list args;
    if (v->n_changes == sizeof v->change / sizeof v->change[0]) return;
    va_start(args, fmt);
    vsnprintf(v->change[v->n_changes++], sizeof v->change[0], fmt, args);
    va_end(args);
}

static double larger(double a, double b) { return a > b ? a : b; }

double nvme_step_seconds(double params, const struct nvme_evidence *e)
{
    double both = e->optimizer > 0 ? e->optimizer : e->mixed;
    if (!(e->read > 0) || !(e->write > 0)) return 0;
    if (!(both > 0)) both = 2 / (1 / e->read + 1 / e->write); /* one after the other */
    double s = params * (NVME_VISIT_READ / e->read + NVME_VISIT_WRITE / e->write +
                         NVME_UPDATE_BOTH / both);
    if (e->sustained > 0) s = larger(s, params * NVME_STEP_WRITE / e->sustained);
    return s;
}

/* --- what limits ------------------------------------------------------------------------------ */

static bool fio_is_faster(const struct nvme_evidence *e)
{
    return e->share_of_fio > 0 && e->share_of_fio < (e->uring ? 0.85 : 0.95);
}

static enum nvme_limit limit_of(const struct nvme_evidence *e)
{
    double best = larger(e->best_read, e->read);
    if (e->memory) return LIMIT_PAGE_CACHE;
    if (!(best > 0) && !(e->write > 0)) return LIMIT_UNKNOWN;
    if (e->link > 0 && best >= 0.85 * e->link) return LIMIT_LINK;
    if (e->cpu_share >= 0.9) return LIMIT_CPU;
    if (fio_is_faster(e)) return LIMIT_SETTINGS;
    if (e->train_read > 0 && e->train_read < 0.85 * e->best_read) return LIMIT_SETTINGS;
    return LIMIT_DRIVE;
}

static void say_what(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    char size[32];
    double best = larger(e->best_read, e->read), write = larger(e->best_write, e->write);
    const char *many = e->n_paths > 1 ? "s" : "";
#define SAY(...) snprintf(v->what, sizeof v->what, __VA_ARGS__)
    switch (v->limit) {
    case LIMIT_PAGE_CACHE:
        SAY("memory answered, not a drive: %s", e->memory_why);
        break;
    case LIMIT_UNKNOWN:
        SAY("too little was measured to say what limits");
        break;
    case LIMIT_LINK:
        SAY("the link: reads reach %.2f of the %.2f GB/s that it carries (%.0f %%)", best / 1e9,
            e->link / 1e9, 100 * best / e->link);
        break;
    case LIMIT_CPU:
        SAY("the processor: %.0f %% of the cores were busy with transfers", 100 * e->cpu_share);
        break;
    case LIMIT_SETTINGS:
        if (fio_is_faster(e))
            SAY("the settings: fio gets more from the same file (ours is %.2f of it) with %s",
                e->share_of_fio, e->backend);
        else
            SAY("the settings: reads reach %.2f GB/s as `train` does them, %.2f at %s x %u",
                e->train_read / 1e9, e->best_read / 1e9,
                nvme_size_text(e->best_block, size, sizeof size), e->best_depth);
        break;
    case LIMIT_DRIVE:
        SAY("the drive%s: %.2f GB/s read, %.2f write%s, reached at %s x %u; deeper or larger "
            "gains nothing%s",
            many, best / 1e9, write / 1e9, e->sustained > 0 && e->sustained < 0.9 * write
                ? " in a burst, less sustained" : "",
            nvme_size_text(e->best_block, size, sizeof size), e->best_depth,
            e->link > 0 ? ", and the link has room" : "");
        break;
    }
#undef SAY
}

/* --- what to change --------------------------------------------------------------------------- */

static void advise_limit(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    switch (v->limit) {
    case LIMIT_PAGE_CACHE:
        change(v, "measure a folder on a disk file system that takes O_DIRECT (ext4, xfs): "
                  "`stoker doctor --nvme DIR` says which do");
        break;
    case LIMIT_LINK:
        change(v, "a drive in a slot with more lanes or a newer PCIe generation, or a second "
                  "drive: `--nvme A,B`");
        break;
    case LIMIT_CPU:
        change(v, "larger blocks cost fewer calls: leave `--chunk` at %u or more; stop what else "
                  "uses the cores",
               NVME_CHUNK_ELEMS);
        break;
    case LIMIT_SETTINGS:
        if (!e->uring)
            change(v, "allow io_uring (the container's seccomp profile, sysctl "
                      "kernel.io_uring_disabled=0), then `--storage uring`");
        else if (!fio_is_faster(e))
            change(v, "`train --chunk %llu` moves larger pieces",
                   (unsigned long long)NVME_CHUNK_ELEMS * 4);
        else
            change(v, "look for other load on the drive and run again with `--pairs 8`");
        break;
    case LIMIT_DRIVE:
        change(v, "a second drive of the same kind nearly doubles it: `--nvme A,B` (measure both "
                  "with `stoker bench nvme A B`)");
        break;
    case LIMIT_UNKNOWN:
        change(v, "give it more time: `--time 80`");
        break;
    }
}

static void advise_rest(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    if (e->memory) return;
    if (e->spread > 0.25)
        change(v, "one point measured twice differed by %.0f %%: other load, or a disk with a "
                  "budget of bursts; repeat on a quiet machine, with `--pairs 8` for the shares",
               100 * e->spread);
    if (e->rotational) change(v, "this is a rotating disk: swapped state wants flash");
    if (e->shared_drive && e->n_paths > 1)
        change(v, "some paths share a drive: name one path of each drive");
    if (e->n_paths > 1 && !e->shared_drive && e->sum_share > 0 && e->sum_share < 0.95)
        change(v, "together the drives reach %.0f %% of what each does alone: they share a link, "
                  "a controller or too few cores; try fewer paths",
               100 * e->sum_share);
    if (e->sustained > 0 && e->write > 0 && e->sustained < 0.7 * e->write)
        change(v, "writes fall to %.0f %% when the drive's cache is full: leave more of it free, "
                  "or keep optimizer state in memory (`--optimizer-state host`)",
               100 * e->sustained / e->write);
    if (!e->sustained_known && e->write > 0)
        change(v, "sustained writes are not known yet: `stoker bench nvme ... --sustained`");
}

/* --- what train does, and how long ------------------------------------------------------------ */

static void say_settings(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    char weights[256] = "";
    size_t at = 0;
    double sum = 0;
    for (uint32_t i = 0; i < e->n_paths; i++) sum += e->path_rate[i];
    snprintf(v->settings[v->n_settings++], sizeof v->settings[0],
             "--storage %s --chunk %u: requests of 1 MiB (parameters, gradients) and 5 MiB "
             "(optimizer state), up to 32 in flight per drive",
             e->uring ? "uring" : "posix", NVME_CHUNK_ELEMS);
    for (uint32_t i = 0; i < e->n_paths && e->n_paths > 1 && sum > 0; i++)
        at += (size_t)snprintf(weights + at, sizeof weights - at, "%s%.0f %%", i ? ", " : "",
                               100 * e->path_rate[i] / sum);
    if (at)
        snprintf(v->settings[v->n_settings++], sizeof v->settings[0],
                 "chunks shared out by measured speed: %s", weights);
}

static void say_models(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    static const struct { const char *name; double params; } models[NVME_MODELS] = {
        { "1B", 1e9 }, { "3B", 3e9 }, { "8B", 8e9 }, { "14B", 14e9 }
    };
    for (int i = 0; i < NVME_MODELS; i++) {
        v->model[i].name = models[i].name;
        v->model[i].params = models[i].params;
        v->model[i].seconds = nvme_step_seconds(models[i].params, e);
        v->model[i].written_bytes = models[i].params * NVME_STEP_WRITE;
        if (!(v->model[i].seconds > 0)) continue;
        v->model[i].written_per_day = v->model[i].written_bytes * 86400 / v->model[i].seconds;
        if (e->endurance_bytes > 0)
            v->model[i].endurance_days = e->endurance_bytes / v->model[i].written_per_day;
    }
}

void nvme_judge(const struct nvme_evidence *e, struct nvme_verdict *out)
{
    memset(out, 0, sizeof *out);
    out->limit = limit_of(e);
    say_what(e, out);
    advise_limit(e, out);
    advise_rest(e, out);
    say_settings(e, out);
    say_models(e, out);
}
