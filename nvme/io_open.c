/* nvme/io_open.c - opening and closing: choice of the backend, files, drives, regions, and the
 * words about them.
 *
 * Runs on the application's thread, before the lane begins to submit and after io_drain. Knows no
 * system call; what a backend found out about the machine arrives through io_note. */
#include "nvme/io_impl.h"
#include "nvme/io_sim.h"
#include "base/sys.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MARK_BYTES 4096u

void io_note(struct io *io, const char *fmt, ...)
{
    char text[IO_NOTE_TEXT_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (uint32_t i = 0; i < io->n_notes; i++)
        if (strcmp(io->notes[i], text) == 0) return;
    if (io->n_notes < IO_NOTES_MAX) memcpy(io->notes[io->n_notes++], text, sizeof text);
}

void io_note_drop(struct io *io, const char *begin)
{
    for (uint32_t i = io->n_notes; i-- > 0;) {
        if (strncmp(io->notes[i], begin, strlen(begin)) != 0) continue;
        io->n_notes--;
        memmove(io->notes[i], io->notes[i + 1], (io->n_notes - i) * sizeof *io->notes);
    }
}

const char *io_direct_text(const struct io *io)
{
    bool direct = false, buffered = io->cfg.buffered;
    for (uint32_t i = 0; i < IO_FILES_MAX; i++) {
        direct |= io->files[i].used && io->files[i].direct;
        buffered |= io->files[i].used && !io->files[i].direct;
    }
    return direct && buffered ? "O_DIRECT and buffered" : buffered ? "buffered" : "O_DIRECT";
}

static void describe(struct io *io)
{
    size_t room = sizeof io->description;
    io->backend->describe(io, io->description, room);
    for (uint32_t i = 0; i < io->n_notes; i++) {
        size_t used = strlen(io->description);
        snprintf(io->description + used, room - used, "; %s", io->notes[i]);
    }
}

static stk_status check_config(const struct io_cfg *cfg, struct stk_error *err)
{
    STK_ASSERT(cfg->ex && cfg->lane && cfg->notify);
    if (cfg->depth > IO_DEPTH_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "a queue depth of %u was asked for; at most %u transfers per drive "
                             "are useful",
                             cfg->depth, IO_DEPTH_MAX);
    if (cfg->kind == IO_SIM && (!cfg->sim || !cfg->sim->disk))
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "the simulated disk was chosen but none was given");
    return STK_OK;
}

static stk_status open_backend(struct io *io, struct stk_error *err)
{
    static const struct io_backend *const by_kind[] = {
        [IO_URING] = &io_backend_uring, [IO_POSIX] = &io_backend_posix, [IO_SIM] = &io_backend_sim,
    };
    if (io->cfg.kind != IO_AUTO) {
        io->kind = io->cfg.kind;
        io->backend = by_kind[io->kind];
        return io->backend->open(io, err);
    }
    struct stk_error why = { 0 };
    io->kind = IO_URING;
    io->backend = &io_backend_uring;
    if (io->backend->open(io, &why) == STK_OK) return STK_OK;
    io->n_notes = 0;
    io_note(io, "%.*s", IO_NOTE_TEXT_MAX - 1, why.text);
    io->kind = IO_POSIX;
    io->backend = &io_backend_posix;
    return io->backend->open(io, err);
}

static void mark_owner(struct io *io)
{
    io->owner_pid = getpid();
    uint8_t *page = sys_mmap(MARK_BYTES, false);
    if (!page) return;
    if (madvise(page, MARK_BYTES, MADV_WIPEONFORK) != 0) {
        sys_munmap(page, MARK_BYTES);
        return;
    }
    *page = 1;
    io->owner_mark = page;
}

static void unmark_owner(struct io *io)
{
    if (io->owner_mark) sys_munmap((void *)(uintptr_t)io->owner_mark, MARK_BYTES);
}

stk_status io_open(const struct io_cfg *cfg, struct io **out, struct stk_error *err)
{
    *out = NULL;
    STK_TRY(check_config(cfg, err));
    struct io *io = sys_calloc(1, sizeof *io);
    if (!io)
        return stk_error_set(err, STK_ERR_NOMEM, 0,
                             "no memory for the table of transfers (%zu bytes)", sizeof *io);
    io->cfg = *cfg;
    mark_owner(io);
    if (io->cfg.depth == 0) io->cfg.depth = IO_DEPTH_DEFAULT;
    if (io->cfg.workers == 0) io->cfg.workers = IO_WORKERS_DEFAULT;
    io->align = 512;
    io_pump_init(io);
    exec_event_init(cfg->ex, &io->drained);
    exec_event_init(cfg->ex, &io->answered);
    stk_status status = open_backend(io, err);
    if (status != STK_OK) {
        unmark_owner(io);
        sys_free(io);
        return status;
    }
    describe(io);
    *out = io;
    return STK_OK;
}

/* On the lane: nothing of this io may still be queued there when its memory goes. */
static void leave_lane(void *arg)
{
    struct io *io = arg;
    exec_cancel(&io->pump);
    exec_cancel(io->cfg.notify);
    if (io->backend->quiesce) io->backend->quiesce(io);
    exec_event_set(&io->answered);
}

/* On the lane: from here on no part is started. */
static void stop_starting(void *arg)
{
    struct io *io = arg;
    io->closing = true;
    exec_event_set(&io->answered);
}

void io_stop(struct io *io)
{
    if (!io || io->stopped || io_check_owner(io, NULL) != STK_OK) return;
    exec_event_reset(&io->answered);
    exec_task_init(&io->ask, stop_starting, io);
    exec_post(io->cfg.lane, &io->ask);
    exec_event_wait(&io->answered, UINT64_MAX, NULL);
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++)
        if (io->drives[i].open) io->drives[i].backend->drive_close(io, &io->drives[i]);
    io->backend->close(io);
    io->stopped = true;
}

void io_close(struct io *io)
{
    if (!io) return;
    /* A forked child has copies of descriptors and of a part of the memory, and no threads: nothing
     * here would work. What it has goes when it ends. */
    if (io_check_owner(io, NULL) != STK_OK) return;
    /* Backends first: after that nobody posts to the lane but the lane itself. */
    io_stop(io);
    exec_event_reset(&io->answered);
    exec_task_init(&io->ask, leave_lane, io);
    exec_post(io->cfg.lane, &io->ask);
    exec_event_wait(&io->answered, UINT64_MAX, NULL);
    for (uint32_t i = 0; i < IO_FILES_MAX; i++)
        if (io->files[i].used) io_file_remove(io, i);
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++) sys_free(io->drives[i].parts);
    for (uint32_t i = 0; i < io->n_regions && io->kind != IO_SIM; i++)
        io_region_release(&io->regions[i]);
    unmark_owner(io);
    sys_free(io);
}

const char *io_describe(const struct io *io) { return io->description; }
enum io_kind io_kind_of(const struct io *io) { return io->kind; }

bool io_direct(const struct io *io)
{
    bool any = false;
    for (uint32_t i = 0; i < IO_FILES_MAX; i++) {
        if (!io->files[i].used) continue;
        if (!io->files[i].direct || io->files[i].in_memory) return false;
        any = true;
    }
    return any;
}

uint32_t io_align(const struct io *io) { return io->align; }

/* --- drives and files ------------------------------------------------------------------------- */

/* With this backend; a failure leaves nothing behind. */
static stk_status drive_open_with(struct io *io, struct io_drive *d,
                                  const struct io_backend *backend, struct io_file *first,
                                  struct stk_error *err)
{
    d->backend = backend;
    d->index = (uint32_t)(d - io->drives);
    d->depth = io->cfg.depth;
    if (backend->depth_max && d->depth > backend->depth_max(io)) d->depth = backend->depth_max(io);
    d->write_depth = io->cfg.write_depth ? io->cfg.write_depth : (d->depth + 1) / 2;
    d->parts = sys_calloc(d->depth, sizeof *d->parts);
    if (!d->parts)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for %u transfers of drive %u",
                             d->depth, d->index);
    d->free_parts = NULL;
    for (uint32_t i = d->depth; i-- > 0;) {
        struct io_part *p = &d->parts[i];
        p->io = io;
        p->drive = d;
        p->index = i;
        p->next = d->free_parts;
        d->free_parts = p;
    }
    stk_status status = backend->drive_open(io, d, first, err);
    d->open = status == STK_OK;
    if (d->open) return STK_OK;
    sys_free(d->parts);
    d->parts = d->free_parts = NULL;
    d->backend = NULL;
    return status;
}

/* The choice of io_open was made with one ring; a second one, or that of another process of this
 * user, may be one too many (NVM-28). */
static stk_status drive_open(struct io *io, struct io_drive *d, struct io_file *first,
                             struct stk_error *err)
{
    if (d->open) return STK_OK;
    if (io->cfg.kind != IO_AUTO || io->kind != IO_URING)
        return drive_open_with(io, d, io->backend, first, err);
    struct stk_error why = { 0 };
    stk_status status = drive_open_with(io, d, &io_backend_uring, first, &why);
    if (status != STK_ERR_UNSUPPORTED) {
        if (status != STK_OK) stk_error_forward(err, &why);
        return status;
    }
    bool rings = false;
    for (uint32_t i = 0; i < IO_DRIVES_MAX; i++) rings |= io->drives[i].open;
    if (!rings) {
        io->kind = IO_POSIX;
        io->backend = &io_backend_posix;
        io_note(io, "%.*s", IO_NOTE_TEXT_MAX - 1, why.text);
    } else {
        io_note(io, "drive %u is served by posix threads: %.*s", d->index, IO_NOTE_TEXT_MAX - 64,
                why.text);
    }
    return drive_open_with(io, d, &io_backend_posix, first, err);
}

stk_status io_file_add(struct io *io, const char *path, uint32_t drive, uint32_t *out_file,
                       struct stk_error *err)
{
    STK_TRY(io_check_owner(io, err));
    uint32_t i = 0;
    while (i < IO_FILES_MAX && io->files[i].used) i++;
    if (i == IO_FILES_MAX || drive >= IO_DRIVES_MAX)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "%s: at most %d files on %d drives can be open for transfers", path,
                             IO_FILES_MAX, IO_DRIVES_MAX);
    struct io_file *f = &io->files[i];
    *f = (struct io_file){ .fd = -1, .index = i, .drive = drive, .path = sys_strdup(path) };
    if (!f->path)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "%s: no memory for the file's name", path);
    stk_status status = io->backend->file_open(io, f, err);
    if (status == STK_OK && f->align > 4096)
        status = stk_error_set(err, STK_ERR_UNSUPPORTED, 0,
                               "%s: direct transfers must be aligned to %u bytes there; at most "
                               "4096 is supported: choose another "
                               "drive",
                               path, f->align);
    if (status == STK_OK) status = drive_open(io, &io->drives[drive], f, err);
    if (status != STK_OK) {
        if (f->fd >= 0 || f->impl) io->backend->file_close(io, f);
        sys_free(f->path);
        *f = (struct io_file){ .fd = -1 };
        return status;
    }
    f->used = true;
    if (io->backend->file_join) io->backend->file_join(io, &io->drives[drive], f);
    if (f->align > io->align) io->align = f->align;
    describe(io);
    *out_file = i;
    return STK_OK;
}

void io_file_remove(struct io *io, uint32_t file)
{
    STK_ASSERT(file < IO_FILES_MAX && io->files[file].used);
    if (io_check_owner(io, NULL) != STK_OK) return;
    struct io_file *f = &io->files[file];
    io->backend->file_close(io, f);
    sys_free(f->path);
    *f = (struct io_file){ .fd = -1 };
}

void io_buffer_register(struct io *io, void *base, uint64_t size_bytes)
{
    if (io_check_owner(io, NULL) != STK_OK) return;
    if (io->n_regions == IO_REGIONS_MAX) {
        io_note(io, "only the first %d regions of buffers were registered", IO_REGIONS_MAX);
    } else {
        io->regions[io->n_regions] = (struct io_region){ base, size_bytes };
        if (io->kind != IO_SIM) io_region_prepare(&io->regions[io->n_regions]);
        io->backend->region_add(io, &io->regions[io->n_regions++]);
    }
    describe(io);
}
