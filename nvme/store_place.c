/* nvme/store_place.c - which path each extent lies on, and what the store will need.
 *
 * Pure functions of the configuration and, where limits are not given, of what is free: no system
 * call, no state. Any thread.
 *
 * Each path first gets a SHARE of all bytes in proportion to its weight; where a limit (or what is
 * free on a file system) is less, the share is that and the rest goes to the others, again by
 * weight ("water filling"). Then the extents of each class are dealt in order of id by smooth
 * weighted round-robin (nginx, 2012), in bytes and with the shares as weights: every path's credit
 * grows by its part of the extent, the highest credit takes the extent and pays for it. So a drive
 * that is short of room is used less along the whole class, not fully at its begin and never at its
 * end. */
#include "nvme/store_impl.h"

#include <stdio.h>
#include <string.h>

uint32_t store_extent_class(const struct store_cfg *cfg, uint32_t extent)
{
    return cfg->extent_class ? cfg->extent_class[extent] : 0;
}

uint32_t store_extent_room(const struct store_cfg *cfg, uint32_t extent)
{
    if (cfg->volatile_classes >> store_extent_class(cfg, extent) & 1) return cfg->room ? 1 : 0;
    return cfg->room;
}

uint64_t store_half_bytes(const struct store_cfg *cfg)
{
    if (cfg->payload_max_bytes == 0) return 0;
    return store_round(store_table_fixed_bytes(cfg->n_paths, cfg->n_extents) +
                       cfg->payload_max_bytes);
}

/* What is left of everything that limits a path. */
struct fill {
    const struct store_cfg *cfg;
    struct store_free room;
    uint64_t limit[STORE_PATHS_MAX];  /* left on each path */
    double weight[STORE_PATHS_MAX];   /* 0: gets nothing */
    double share[STORE_PATHS_MAX];
    double credit[STORE_CLASSES_MAX][STORE_PATHS_MAX];
};

static uint64_t take(uint64_t left, uint64_t bytes)
{
    if (left == UINT64_MAX) return left;
    return left > bytes ? left - bytes : 0;
}

static uint64_t left_on(const struct fill *f, uint32_t k)
{
    uint64_t group = f->room.bytes[f->room.group[k]];
    return f->limit[k] < group ? f->limit[k] : group;
}

/* False: not even the tables fit. */
static bool fill_start(struct fill *f, const struct store_cfg *cfg, const struct store_free *room)
{
    bool weighted = false, fits = true;
    *f = (struct fill){ .cfg = cfg };
    for (uint32_t k = 0; k < cfg->n_paths; k++) weighted |= cfg->weights[k] > 0;
    for (uint32_t k = 0; k < cfg->n_paths; k++) {
        f->weight[k] = !weighted ? 1.0 : cfg->weights[k] > 0 ? cfg->weights[k] : 0.0;
        f->limit[k] = cfg->limits[k] ? cfg->limits[k] : UINT64_MAX;
        f->room.group[k] = room ? room->group[k] : k;
    }
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++)
        f->room.bytes[k] = room ? room->bytes[k] : UINT64_MAX;
    uint64_t table = 2 * store_half_bytes(cfg);
    for (uint32_t k = 0; k < cfg->n_paths; k++) {
        fits = fits && left_on(f, k) >= table;
        f->limit[k] = take(f->limit[k], table);
        uint64_t *group = &f->room.bytes[f->room.group[k]];
        *group = take(*group, table);
    }
    return fits;
}

/* --- shares ----------------------------------------------------------------------------------- */

struct shares { bool active[STORE_PATHS_MAX]; double rest, group[STORE_PATHS_MAX]; };

static double active_weight(const struct fill *f, const struct shares *w, uint32_t group)
{
    double sum = 0;
    for (uint32_t k = 0; k < f->cfg->n_paths; k++)
        if (w->active[k] && (group == STORE_PATHS_MAX || f->room.group[k] == group))
            sum += f->weight[k];
    return sum;
}

/* Fixes the share of the path, or of the file system's paths, that falls shortest of what its
 * weight asks for; false: nothing falls short. */
static bool shares_fix_one(struct fill *f, struct shares *w)
{
    uint32_t n = f->cfg->n_paths, path = STORE_PATHS_MAX, group = STORE_PATHS_MAX;
    double total = active_weight(f, w, STORE_PATHS_MAX), worst = 1;
    for (uint32_t k = 0; k < n && total > 0; k++) {
        if (!w->active[k]) continue;
        double alone = (double)f->limit[k] / (w->rest * f->weight[k] / total);
        double together = w->group[f->room.group[k]] /
                          (w->rest * active_weight(f, w, f->room.group[k]) / total);
        if (alone < worst) {
            worst = alone;
            path = k;
            group = STORE_PATHS_MAX;
        }
        if (together < worst) {
            worst = together;
            group = f->room.group[k];
        }
    }
    if (worst >= 1) return false;
    double of_group = active_weight(f, w, group), room = group < n ? w->group[group] : 0;
    for (uint32_t k = 0; k < n; k++) {
        if (!w->active[k] || (group < n ? f->room.group[k] != group : k != path)) continue;
        f->share[k] = group < n ? room * f->weight[k] / of_group : (double)f->limit[k];
        w->active[k] = false;
        w->rest -= f->share[k];
        w->group[f->room.group[k]] -= f->share[k];
    }
    return true;
}

static void fill_shares(struct fill *f, uint64_t total_bytes)
{
    struct shares w = { .rest = (double)total_bytes };
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) {
        w.active[k] = k < f->cfg->n_paths && f->weight[k] > 0;
        w.group[k] = (double)f->room.bytes[k];
    }
    while (w.rest > 0 && shares_fix_one(f, &w)) {}
    double weight = active_weight(f, &w, STORE_PATHS_MAX);
    for (uint32_t k = 0; k < f->cfg->n_paths; k++)
        if (w.active[k]) f->share[k] = w.rest > 0 ? w.rest * f->weight[k] / weight : f->weight[k];
}

/* --- dealing ---------------------------------------------------------------------------------- */

/* STORE_PATHS_MAX: no path has room for it. */
static uint32_t deal(struct fill *f, uint32_t cls, uint64_t bytes)
{
    double total = 0, *credit = f->credit[cls];
    uint32_t best = STORE_PATHS_MAX, n = f->cfg->n_paths;
    bool fits[STORE_PATHS_MAX];
    for (uint32_t k = 0; k < n; k++) {
        fits[k] = f->weight[k] > 0 && left_on(f, k) >= bytes;
        if (fits[k]) total += f->share[k];
    }
    for (uint32_t k = 0; k < n; k++) {
        if (!fits[k]) continue;
        credit[k] += total > 0 ? (double)bytes * f->share[k] / total : 0;
        if (best == STORE_PATHS_MAX || credit[k] > credit[best]) best = k;
    }
    if (best == STORE_PATHS_MAX) return best;
    credit[best] -= (double)bytes;
    f->limit[best] = take(f->limit[best], bytes);
    uint64_t *group = &f->room.bytes[f->room.group[best]];
    *group = take(*group, bytes);
    return best;
}

static stk_status no_room(const struct store_cfg *cfg, uint64_t total, uint32_t extent,
                          struct stk_error *err)
{
    char list[400] = "";
    size_t at = 0;
    for (uint32_t k = 0; k < cfg->n_paths && at < sizeof list; k++)
        if (cfg->limits[k])
            at += (size_t)snprintf(list + at, sizeof list - at, "%s%.60s: %llu", at ? ", " : "",
                                   cfg->paths[k] ? cfg->paths[k] : "?",
                                   (unsigned long long)cfg->limits[k]);
    return stk_error_set(err, STK_ERR_NOSPACE, 0,
                         "the store needs %llu bytes on %u paths (all versions of its extents, and "
                         "%llu for tables on each path); extent %u of %llu bytes finds no room; "
                         "limits: %s; raise a limit, free space, or name another path",
                         (unsigned long long)total, cfg->n_paths,
                         (unsigned long long)(2 * store_half_bytes(cfg)), extent,
                         (unsigned long long)(extent < cfg->n_extents ? cfg->extent_bytes[extent]
                                                                      : 0),
                         list[0] ? list : "what is free");
}

static uint64_t extent_total(const struct store_cfg *cfg, uint32_t i)
{
    return store_round(cfg->extent_bytes[i]) * store_extent_room(cfg, i);
}

stk_status store_place(const struct store_cfg *cfg, const struct store_free *room,
                       struct store_extent *extents, uint64_t path_bytes[STORE_PATHS_MAX],
                       struct stk_error *err)
{
    struct fill f;
    uint64_t total = 0;
    for (uint32_t i = 0; i < cfg->n_extents; i++) total += extent_total(cfg, i);
    for (uint32_t k = 0; k < STORE_PATHS_MAX; k++) path_bytes[k] = 0;
    if (!fill_start(&f, cfg, room)) return no_room(cfg, total, 0, err);
    fill_shares(&f, total);
    for (uint32_t i = 0; i < cfg->n_extents; i++) {
        uint64_t bytes = extent_total(cfg, i);
        uint32_t k = deal(&f, store_extent_class(cfg, i), bytes);
        if (k == STORE_PATHS_MAX) return no_room(cfg, total, i, err);
        if (extents) {
            extents[i].path = k;
            extents[i].offset_bytes = path_bytes[k];
            extents[i].payload_bytes = cfg->extent_bytes[i];
        }
        path_bytes[k] += bytes;
    }
    return STK_OK;
}

/* --- what it will need ------------------------------------------------------------------------ */

uint64_t store_need_bytes(const struct store_cfg *cfg, uint32_t path)
{
    uint64_t bytes[STORE_PATHS_MAX];
    if (path >= cfg->n_paths) return 0;
    if (store_place(cfg, NULL, NULL, bytes, NULL) != STK_OK) {
        struct store_cfg free_of = *cfg; /* the figure that the refusal is about */
        memset(free_of.limits, 0, sizeof free_of.limits);
        (void)store_place(&free_of, NULL, NULL, bytes, NULL);
    }
    return bytes[path] + 2 * store_half_bytes(cfg);
}

uint64_t store_memory_bytes(const struct store_cfg *cfg)
{
    uint64_t names = 0;
    for (uint32_t k = 0; k < cfg->n_paths; k++) {
        uint64_t path = cfg->paths[k] ? strlen(cfg->paths[k]) : 0;
        uint64_t folder = path + strlen("/" STORE_FOLDER_PREFIX) + STORE_RUN_ID_CHARS;
        names += path + 1 + folder + 1 + folder + strlen("/extents-.bin") + (k < 10 ? 1 : 2) + 1;
        if (cfg->payload_max_bytes) names += folder + strlen("/" STORE_TABLE_NAME) + 1;
    }
    uint32_t n = cfg->n_extents ? cfg->n_extents : 1;
    return sizeof(struct store) + n * (uint64_t)sizeof(struct store_extent) + names +
           store_half_bytes(cfg);
}
