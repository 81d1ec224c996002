/* nvme/io_sim_disk.c - the medium of the simulated disk: what is stored, what should be stored,
 * what would survive a power cut.
 *
 * Owns the bytes. Decides nothing about faults and knows no time (io_sim.c does). Used from one
 * lane at a time, or by a test between two runs. Pages of 4 KiB exist once they are written, their
 * second and third copy only where they differ. */
#include "nvme/io_sim_disk.h"
#include "base/rng.h"
#include "base/sys.h"

#include <string.h>

enum { SECTOR_BYTES = 512 };

static void file_free_pages(struct sim_file *f, uint64_t from)
{
    for (uint64_t i = from; i < f->n_pages; i++) {
        sys_free(f->pages[i].medium);
        sys_free(f->pages[i].pristine);
        sys_free(f->pages[i].durable);
        f->pages[i] = (struct sim_page){ 0 };
    }
}

stk_status io_sim_disk_new(uint64_t capacity_bytes, struct io_sim_disk **out, struct stk_error *err)
{
    *out = sys_calloc(1, sizeof **out);
    if (!*out) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a simulated disk");
    (*out)->capacity_bytes = capacity_bytes;
    return STK_OK;
}

static void file_free(struct sim_file *f)
{
    file_free_pages(f, 0);
    sys_free(f->pages);
    sys_free(f->path);
    sys_free(f);
}

void io_sim_disk_free(struct io_sim_disk *d)
{
    if (!d) return;
    while (d->files) {
        struct sim_file *f = d->files;
        d->files = f->next;
        file_free(f);
    }
    sys_free(d);
}

struct sim_file *sim_file_find(const struct io_sim_disk *d, const char *path)
{
    for (struct sim_file *f = d->files; f; f = f->next)
        if (strcmp(f->path, path) == 0) return f;
    return NULL;
}

static stk_status file_resize(struct sim_file *f, uint64_t size_bytes, struct stk_error *err)
{
    uint64_t n = (size_bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES;
    struct sim_page *pages = sys_calloc(n ? n : 1, sizeof *pages);
    if (!pages)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for a simulated file", f->path);
    uint64_t keep = n < f->n_pages ? n : f->n_pages;
    if (keep) memcpy(pages, f->pages, keep * sizeof *pages);
    file_free_pages(f, keep);
    sys_free(f->pages);
    f->pages = pages;
    f->n_pages = n;
    f->size_bytes = size_bytes;
    return STK_OK;
}

stk_status io_sim_file_create(struct io_sim_disk *d, const char *path, uint64_t size_bytes,
                              struct stk_error *err)
{
    struct sim_file *f = sim_file_find(d, path);
    uint64_t others = d->used_bytes - (f ? f->size_bytes : 0);
    if (size_bytes > d->capacity_bytes || others > d->capacity_bytes - size_bytes)
        return stk_error_set(err, STK_ERR_NOSPACE, 0,
                             "%s: %llu bytes do not fit on the simulated disk (%llu of %llu are "
                             "taken)",
                             path, (unsigned long long)size_bytes, (unsigned long long)others,
                             (unsigned long long)d->capacity_bytes);
    bool made = !f;
    if (made) {
        f = sys_calloc(1, sizeof *f);
        if (f) f->path = sys_strdup(path);
        if (!f || !f->path) {
            sys_free(f);
            return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for a simulated file", path);
        }
    }
    stk_status status = file_resize(f, size_bytes, err);
    if (status != STK_OK) {
        if (made) file_free(f);
        return status;
    }
    if (made) {
        f->next = d->files;
        d->files = f;
    }
    d->used_bytes = others + size_bytes;
    return STK_OK;
}

void io_sim_file_remove(struct io_sim_disk *d, const char *path)
{
    for (struct sim_file **at = &d->files; *at; at = &(*at)->next) {
        struct sim_file *f = *at;
        if (strcmp(f->path, path) != 0) continue;
        *at = f->next;
        d->used_bytes -= f->size_bytes;
        file_free(f);
        return;
    }
}

uint64_t io_sim_free_bytes(const struct io_sim_disk *d)
{
    return d->capacity_bytes - d->used_bytes;
}

uint64_t io_sim_faults_done(const struct io_sim_disk *d, uint64_t out_by_kind[11])
{
    uint64_t sum = 0;
    for (int k = 0; k < SIM_FAULT_N; k++) {
        if (out_by_kind) out_by_kind[k] = d->faults[k];
        sum += d->faults[k];
    }
    return sum;
}

/* --- bytes ------------------------------------------------------------------------------------ */

void sim_read(const struct sim_file *f, uint64_t offset_bytes, uint8_t *buf, uint64_t size_bytes)
{
    while (size_bytes > 0) {
        const struct sim_page *page = &f->pages[offset_bytes / SIM_PAGE_BYTES];
        uint64_t in = offset_bytes % SIM_PAGE_BYTES, n = SIM_PAGE_BYTES - in;
        if (n > size_bytes) n = size_bytes;
        if (page->medium) memcpy(buf, page->medium + in, n);
        else memset(buf, 0, n);
        buf += n;
        offset_bytes += n;
        size_bytes -= n;
    }
}

static uint8_t *copy_page(const uint8_t *from)
{
    uint8_t *p = sys_calloc(1, SIM_PAGE_BYTES);
    if (p && from) memcpy(p, from, SIM_PAGE_BYTES);
    return p;
}

/* Makes the copies that this kind of change needs. */
static bool page_prepare(struct sim_page *page, enum sim_copy copy)
{
    if (!page->dirty) {
        if (page->medium && !(page->durable = copy_page(page->medium))) return false;
        page->dirty = true;
    }
    if (!page->medium && !(page->medium = copy_page(NULL))) return false;
    if (copy != SIM_BOTH && !page->pristine && !(page->pristine = copy_page(page->medium)))
        return false;
    return true;
}

bool sim_write(struct sim_file *f, uint64_t offset_bytes, const uint8_t *buf, uint64_t size_bytes,
               enum sim_copy copy)
{
    while (size_bytes > 0) {
        struct sim_page *page = &f->pages[offset_bytes / SIM_PAGE_BYTES];
        uint64_t in = offset_bytes % SIM_PAGE_BYTES, n = SIM_PAGE_BYTES - in;
        if (n > size_bytes) n = size_bytes;
        if (!page_prepare(page, copy)) return false;
        if (copy != SIM_PRISTINE) memcpy(page->medium + in, buf, n);
        if (copy != SIM_MEDIUM && page->pristine) memcpy(page->pristine + in, buf, n);
        buf += n;
        offset_bytes += n;
        size_bytes -= n;
    }
    return true;
}

bool sim_flip_bit(struct sim_file *f, uint64_t offset_bytes, uint32_t bit)
{
    uint8_t byte;
    if (offset_bytes >= f->size_bytes) return false;
    sim_read(f, offset_bytes, &byte, 1);
    byte ^= (uint8_t)(1u << (bit & 7));
    return sim_write(f, offset_bytes, &byte, 1, SIM_MEDIUM);
}

bool io_sim_flip(struct io_sim_disk *d, const char *path, uint64_t offset_bytes, uint32_t bit)
{
    struct sim_file *f = sim_file_find(d, path);
    return f && sim_flip_bit(f, offset_bytes, bit);
}

void sim_flush(struct sim_file *f)
{
    for (uint64_t i = 0; i < f->n_pages; i++) {
        sys_free(f->pages[i].durable);
        f->pages[i].durable = NULL;
        f->pages[i].dirty = false;
    }
}

bool io_sim_damaged(const struct io_sim_disk *d, const char *path, uint64_t offset_bytes,
                    uint64_t size_bytes)
{
    const struct sim_file *f = sim_file_find(d, path);
    if (!f || offset_bytes >= f->size_bytes) return false;
    if (size_bytes > f->size_bytes - offset_bytes) size_bytes = f->size_bytes - offset_bytes;
    while (size_bytes > 0) {
        const struct sim_page *page = &f->pages[offset_bytes / SIM_PAGE_BYTES];
        uint64_t in = offset_bytes % SIM_PAGE_BYTES, n = SIM_PAGE_BYTES - in;
        if (n > size_bytes) n = size_bytes;
        if (page->pristine && memcmp(page->pristine + in, page->medium + in, n) != 0) return true;
        offset_bytes += n;
        size_bytes -= n;
    }
    return false;
}

/* --- outside of any io ------------------------------------------------------------------------ */

static struct sim_file *file_holding(const struct io_sim_disk *d, const char *path,
                                     uint64_t offset_bytes, uint64_t size_bytes)
{
    struct sim_file *f = sim_file_find(d, path);
    bool inside =
        f && offset_bytes <= f->size_bytes && size_bytes <= f->size_bytes - offset_bytes;
    return inside ? f : NULL;
}

bool io_sim_file_size(const struct io_sim_disk *d, const char *path, uint64_t *out_bytes)
{
    const struct sim_file *f = sim_file_find(d, path);
    if (f) *out_bytes = f->size_bytes;
    return f != NULL;
}

bool io_sim_peek(const struct io_sim_disk *d, const char *path, uint64_t offset_bytes, void *buf,
                 uint64_t size_bytes)
{
    const struct sim_file *f = file_holding(d, path, offset_bytes, size_bytes);
    if (f) sim_read(f, offset_bytes, buf, size_bytes);
    return f != NULL;
}

bool io_sim_poke(struct io_sim_disk *d, const char *path, uint64_t offset_bytes, const void *buf,
                 uint64_t size_bytes)
{
    struct sim_file *f = file_holding(d, path, offset_bytes, size_bytes);
    if (!f || !sim_write(f, offset_bytes, buf, size_bytes, SIM_BOTH)) return false;
    sim_flush(f);
    return true;
}

const char *io_sim_file_name(const struct io_sim_disk *d, uint32_t i)
{
    const struct sim_file *f = d->files;
    while (f && i-- > 0) f = f->next;
    return f ? f->path : NULL;
}

static bool page_copy(struct sim_page *to, const struct sim_page *from)
{
    to->dirty = from->dirty;
    if (from->medium && !(to->medium = copy_page(from->medium))) return false;
    if (from->pristine && !(to->pristine = copy_page(from->pristine))) return false;
    return !from->durable || (to->durable = copy_page(from->durable));
}

stk_status io_sim_disk_copy(const struct io_sim_disk *d, struct io_sim_disk **out,
                            struct stk_error *err)
{
    STK_TRY(io_sim_disk_new(d->capacity_bytes, out, err));
    stk_status status = STK_OK;
    for (const struct sim_file *f = d->files; f && status == STK_OK; f = f->next) {
        status = io_sim_file_create(*out, f->path, f->size_bytes, err);
        for (uint64_t i = 0; status == STK_OK && i < f->n_pages; i++)
            if (!page_copy(&(*out)->files->pages[i], &f->pages[i]))
                status = stk_error_set(err, STK_ERR_NOMEM, 0, "no memory to copy a simulated disk");
    }
    if (status == STK_OK) return status;
    io_sim_disk_free(*out);
    *out = NULL;
    return status;
}

/* --- power ------------------------------------------------------------------------------------ */

static void page_cut(struct sim_page *page, struct rng *r, bool all)
{
    for (uint32_t s = 0; s < SIM_PAGE_BYTES; s += SECTOR_BYTES) {
        if (!all && (rng_next(r) & 1)) continue;
        if (page->durable) memcpy(page->medium + s, page->durable + s, SECTOR_BYTES);
        else memset(page->medium + s, 0, SECTOR_BYTES);
    }
    sys_free(page->durable);
    sys_free(page->pristine); /* after a power cut what was not flushed is owed to nobody */
    page->durable = page->pristine = NULL;
    page->dirty = false;
}

void io_sim_power_cut(struct io_sim_disk *d, uint64_t seed)
{
    struct rng r;
    rng_seed(&r, seed);
    for (struct sim_file *f = d->files; f; f = f->next)
        for (uint64_t i = 0; i < f->n_pages; i++)
            if (f->pages[i].dirty && f->pages[i].medium) page_cut(&f->pages[i], &r, seed == 0);
}
