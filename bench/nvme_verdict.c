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

static double seconds_of(double params, double read, double write, double both, double sustained)
{
    if (!(read > 0) || !(write > 0)) return 0;
    if (!(both > 0)) both = 2 / (1 / read + 1 / write); /* one after the other */
    double s = params *
               (NVME_VISIT_READ / read + NVME_VISIT_WRITE / write + NVME_UPDATE_BOTH / both);
    return sustained > 0 ? larger(s, params * NVME_STEP_WRITE / sustained) : s;
}

static const struct nvme_span *both_ways(const struct nvme_evidence *e)
{
    return e->optimizer.median > 0 ? &e->optimizer : &e->mixed;
}

double nvme_step_seconds(double params, const struct nvme_evidence *e)
{
    return seconds_of(params, e->read.median, e->write.median, both_ways(e)->median, e->sustained);
}

/* --- what limits ------------------------------------------------------------------------------ */

static bool fio_is_faster(const struct nvme_evidence *e)
{
    return e->share_of_fio > 0 && e->share_of_fio < (e->uring ? 0.85 : 0.95);
}

static enum nvme_limit limit_of(const struct nvme_evidence *e)
{
    if (e->memory) return LIMIT_PAGE_CACHE;
    if (!(e->best_read > 0) && !(e->best_write > 0)) return LIMIT_UNKNOWN;
    if (e->link > 0 && e->best_read >= 0.85 * e->link) return LIMIT_LINK;
    if (e->cpu_share >= 0.9) return LIMIT_CPU;
    if (fio_is_faster(e)) return LIMIT_SETTINGS;
    if (e->train_read > 0 && e->train_read < 0.85 * e->best_read) return LIMIT_SETTINGS;
    return LIMIT_DRIVE;
}

#define ADD(...) (at += (size_t)snprintf(v->what + at, sizeof v->what - at, __VA_ARGS__))

/* Each rate with the point that it was measured at; only what was measured, and of more depth or
 * larger blocks only where they were tried. */
static void say_drive(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    char size[32];
    size_t at = 0;
    ADD("the drive%s:", e->n_paths > 1 ? "s" : "");
    if (e->best_read > 0)
        ADD(" %.2f GB/s read at %s x %u", e->best_read / 1e9,
            nvme_size_text(e->best_block, size, sizeof size), e->best_depth);
    if (e->best_write > 0)
        ADD("%s %.2f %swritten at %s x %u", e->best_read > 0 ? "," : "", e->best_write / 1e9,
            e->best_read > 0 ? "" : "GB/s ",
            nvme_size_text(e->best_write_block, size, sizeof size), e->best_write_depth);
    if (e->best_write > 0 && e->fell) ADD(" in a burst, %.2f sustained", e->sustained / 1e9);
    if (e->enough_read > 0 && e->deeper_read > 0)
        ADD("; in the sweep reads were best at %s x %u (%.2f GB/s) and deeper ones slower (%.2f at "
            "x %u)",
            nvme_size_text(e->enough_block, size, sizeof size), e->enough_depth,
            e->enough_read / 1e9, e->deeper_read / 1e9, e->deeper_depth);
    else if (e->enough_read > 0)
        ADD("; reads gain nothing beyond %s x %u",
            nvme_size_text(e->enough_block, size, sizeof size), e->enough_depth);
    if (e->link > 0 && e->best_read > 0) ADD("; the link has room");
}
#undef ADD

static void say_what(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    char size[32];
#define SAY(...) snprintf(v->what, sizeof v->what, __VA_ARGS__)
    switch (v->limit) {
    case LIMIT_PAGE_CACHE:
        SAY("memory answered, not a drive: %s", e->memory_why);
        break;
    case LIMIT_UNKNOWN:
        SAY("too little was measured to say what limits");
        break;
    case LIMIT_LINK:
        SAY("the link: reads reach %.2f of the %.2f GB/s that it carries (%.0f %%)",
            e->best_read / 1e9, e->link / 1e9, 100 * e->best_read / e->link);
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
        say_drive(e, v);
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

/* What was measured at different moments and does not agree. */
static void advise_time(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    if (e->spread > 0.25)
        change(v, "samples of one point differ by up to %.0f %%: other load, or a disk with a "
                  "budget of bursts; repeat on a quiet machine%s",
               100 * e->spread, e->pairs < 8 ? ", with `--pairs 8` for the shares" : "");
    if (e->drift > 0 && (e->drift < 0.85 || e->drift > 1 / 0.85))
        change(v, "the first point (%s), measured again at the end of the run, went at %.0f %% of "
                  "its first rate: other load, heat, or a disk with a budget of bursts; what was "
                  "measured in between belongs to different moments",
               nvme_mode_name(e->drift_mode), 100 * e->drift);
    if (e->late_over_early > 0 && e->late_over_early < 0.9 && !e->fell)
        change(v, "the long series decays: its last tenth ran at %.0f %% of its second (%u threads "
                  "and %u workers of the kernel at its end); see whether it recovers after a pause",
               100 * e->late_over_early, e->workers.threads, e->workers.kernel);
}

/* A cache is to blame only where the series of writes itself fell. */
static void advise_writes(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    double write = e->write.median;
    if (e->sustained > 0 && e->fell && e->sustained < 0.7 * e->burst)
        change(v, "writes fall to %.0f %% when the drive's cache is full: leave more of it free, "
                  "or keep optimizer state in memory (`--optimizer-state host`)",
               100 * e->sustained / e->burst);
    else if (e->sustained > 0 && !e->fell && e->sustained < 0.7 * write)
        change(v, "the long series of writes ran at %.2f GB/s from its first second on, the points "
                  "before it at %.2f: no cache filled meanwhile, so other load or a budget of "
                  "bursts; the seconds below take the lower one",
               e->sustained / 1e9, write / 1e9);
    if (!e->sustained_known && write > 0)
        change(v, "sustained writes are not known yet: `stoker bench nvme ... --sustained`");
}

static void advise_rest(const struct nvme_evidence *e, struct nvme_verdict *v)
{
    if (e->memory) return;
    advise_time(e, v);
    if (e->rotational) change(v, "this is a rotating disk: swapped state wants flash");
    if (e->shared_drive && e->n_paths > 1)
        change(v, "some paths share a drive: name one path of each drive");
    if (e->n_paths > 1 && !e->shared_drive && e->sum_share > 0 && e->sum_share < 0.95)
        change(v, "together the drives reach %.0f %% of what each does alone: they share a link, "
                  "a controller or too few cores; try fewer paths",
               100 * e->sum_share);
    advise_writes(e, v);
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
             "(optimizer state), up to 16 MiB of them in flight per drive",
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
    const struct nvme_span *r = &e->read, *w = &e->write, *both = both_ways(e);
    v->samples = r->n < w->n ? r->n : w->n;
    if (both->n > 0 && both->n < v->samples) v->samples = both->n;
    for (int i = 0; i < NVME_MODELS; i++) {
        v->model[i].name = models[i].name;
        v->model[i].params = models[i].params;
        v->model[i].seconds = nvme_step_seconds(models[i].params, e);
        v->model[i].seconds_low =
            seconds_of(models[i].params, r->high, w->high, both->high, e->sustained);
        v->model[i].seconds_high =
            seconds_of(models[i].params, r->low, w->low, both->low, e->sustained);
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
