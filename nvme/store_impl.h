/* nvme/store_impl.h - what store.c (extents, versions, checksums) and store_files.c (folders,
 * locks, files, placement) share. Private to nvme/store*.c. */
#ifndef NVME_STORE_IMPL_H
#define NVME_STORE_IMPL_H

#include "nvme/store.h"

#include <stdatomic.h>

#define STORE_NONE UINT64_MAX
#define STORE_ROOM_MAX 3
#define STORE_NOTES_MAX 32
#define STORE_LANES_MAX 16
#define STORE_TABLE_NAME \
    "table.bin" /* a run folder that holds it is a durable store and never removed here */
#define STORE_FOLDER_PREFIX "stoker-run-"

struct store_path {
    char *path;     /* as configured */
    char *folder;   /* path/stoker-run-<16 hex>; NULL: not made */
    char *file;     /* folder/extents-<k>.bin */
    int lock_fd;
    uint32_t drive, io_file;
    bool added;     /* io_file holds */
    uint64_t size_bytes;
};

struct store_slot { uint64_t version; uint32_t crc; };

struct store_extent {
    uint64_t payload_bytes, offset_bytes; /* slot s begins at offset + s * rounded payload */
    /* newest: slot, or STORE_ROOM_MAX when no complete version is stored */
    uint32_t path, newest;
    uint32_t readers;
    bool writing;
    uint64_t busy_since_ns;
    struct store_slot slots[STORE_ROOM_MAX];
};

struct store {
    struct io *io;
    struct exec *ex;
    struct exec_lane *lane;
    struct io_sim_disk *sim_disk;
    uint32_t room, n_paths, n_extents, n_lanes, next_lane;
    bool checksums;
    struct store_path paths[STORE_PATHS_MAX];
    struct store_extent *extents;
    struct exec_lane *lanes[STORE_LANES_MAX];
    char *notes[STORE_NOTES_MAX];
    uint32_t n_notes;
    char description[160];
    _Atomic uint64_t in_flight;
    _Atomic uint64_t get_bytes, put_bytes, gets, puts, verify_failures;
    struct exec_event drained, answered;
    struct exec_task ask;
    char oldest[640];
};

static inline uint64_t store_round(uint64_t n)
{
    return (n + STORE_ALIGN - 1) & ~(uint64_t)(STORE_ALIGN - 1);
}

/* --- store_files.c ---------------------------------------------------------------------------- */

/* Gives every extent its path and offset: to the path that is least full for its weight. `extents`
 * may be NULL (only sizes). */
void store_place(const struct store_cfg *cfg, struct store_extent *extents,
                 uint64_t path_bytes[STORE_PATHS_MAX]);
/* Removes what dead runs left, checks room, makes folders, locks and files, adds them to the io. On
 * error the caller calls store_files_close, which takes back whatever was made. */
stk_status store_files_open(struct store *s, struct stk_error *err);
void store_files_close(struct store *s);

#endif
