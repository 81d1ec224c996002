/* nvme/store_impl.h - what the store's parts share. Private to nvme/store*.c.
 *
 *   store.c         extents: slots, versions, checksums, put and get
 *   store_place.c   which path and offset each extent gets, as a pure function
 *   store_table.c   the durable table's format, and a commit
 *   store_files.c   folders, locks, files
 *   store_reach.c   whether the names still lead to the open files
 *   store_find.c    durable stores of runs that have ended: find, adopt, discard
 *
 * Invariants: (1) a slot that a table on disk may refer to is protected (store_slot_protected) and
 * never written; (2) the half of table.bin that holds the durable table is never written; (3) a
 * table is written only after every byte that it refers to is flushed. */
#ifndef NVME_STORE_IMPL_H
#define NVME_STORE_IMPL_H

#include "nvme/store.h"

#include <stdatomic.h>

#define STORE_NONE UINT64_MAX
#define STORE_ROOM_MAX 3
#define STORE_NOTES_MAX 32
#define STORE_LANES_MAX 16
#define STORE_TABLE_NAME "table.bin"
#define STORE_LOCK_NAME "lock"
#define STORE_FOLDER_PREFIX "stoker-run-"
#define STORE_RUN_ID_CHARS 16u
#define STORE_LOCK_TEXT_MAX 256
#define STORE_LOCK_DENIED "its lock cannot be opened" /* instead of an owner: nobody knows */
#define STORE_PATH_TEXT_MAX 4096

/* Which file a name led to when it was opened. */
struct store_identity { uint64_t device, inode; bool known; };

struct store_path {
    char *path;     /* as configured */
    char *folder;   /* path/stoker-run-<run id> */
    char *file;     /* folder/extents-<k>.bin */
    char *table;    /* folder/table.bin; NULL: no durable steps */
    bool made;      /* the folder (or, simulated, its files) is ours: close removes it */
    int lock_fd;
    uint32_t drive, io_file, io_table;
    bool added, table_added; /* io_file, io_table hold */
    uint64_t size_bytes;     /* of the file of extents */
    struct store_identity is_file, is_table, is_lock; /* durable steps only */
    _Atomic uint64_t read_bytes, write_bytes;
};

struct store_slot { uint64_t version; uint32_t crc; };

struct store_extent {
    uint64_t payload_bytes, offset_bytes; /* slot s begins at offset + s * rounded payload */
    uint64_t busy_since_ns;
    /* newest: slot, or STORE_ROOM_MAX when no complete version is stored */
    uint32_t path, newest, readers;
    bool writing, fleeting; /* fleeting: of a volatile class */
    bool failed;            /* the last put failed: what is newest is not what the caller wanted */
    uint8_t cls, room;
    uint8_t before;         /* slot that held the newest version before the last put, intact; or
                             * STORE_ROOM_MAX */
    uint8_t durable;        /* slot of the table that counts, or STORE_ROOM_MAX */
    uint8_t committing;     /* slot of the table being committed, or STORE_ROOM_MAX */
    uint8_t doubt;          /* bit k: a table that failed and could not be withdrawn refers to
                             * slot k */
    struct store_slot slots[STORE_ROOM_MAX];
};

struct store {
    struct io *io;
    struct exec *ex;
    struct exec_lane *lane;
    struct io_sim_disk *sim_disk;
    uint32_t room, n_paths, n_extents, n_lanes, next_lane, volatile_classes;
    bool checksums, discard;
    char run_id[STORE_RUN_ID_MAX];
    struct store_path paths[STORE_PATHS_MAX];
    uint32_t path_of_cfg[STORE_PATHS_MAX]; /* an adopted store has the order of its table */
    struct store_extent *extents;
    struct exec_lane *lanes[STORE_LANES_MAX];
    char *notes[STORE_NOTES_MAX];
    uint32_t n_notes;
    char description[160];
    /* durable steps; lane */
    bool durable;              /* a table counts: that of durable_step */
    uint64_t durable_step, seq /* of the last table tried */, half_bytes;
    uint64_t payload_max_bytes, buffer_bytes;
    uint8_t *buffer;           /* the table being committed */
    uint32_t half;             /* the next table goes there */
    struct store_commit *commit;
    struct stk_error in_doubt; /* why the table of a commit is in doubt; STK_OK: none is */
    uint32_t puts_open;        /* puts outside volatile classes */
    struct store_op *wait_head, *wait_tail; /* puts that wait for the commit */
    /* shared */
    _Atomic uint64_t in_flight;
    _Atomic uint64_t get_bytes, put_bytes, gets, puts, verify_failures;
    _Atomic uint64_t commits, commit_ns, puts_waited;
    struct exec_event drained, answered;
    struct exec_task ask;
    char oldest[640];
};

static inline uint64_t store_round(uint64_t n)
{
    return (n + STORE_ALIGN - 1) & ~(uint64_t)(STORE_ALIGN - 1);
}

static inline bool store_slot_protected(const struct store_extent *e, uint32_t slot)
{
    return slot == e->durable || slot == e->committing || (e->doubt >> slot & 1);
}

/* --- store.c ---------------------------------------------------------------------------------- */

void store_note(struct store *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Lane: one thing less is in flight. */
void store_ended(struct store *s);
/* Lane, after a commit: the puts that waited for it go on. */
void store_puts_release(struct store *s);

/* --- store_place.c ---------------------------------------------------------------------------- */

/* What lies free under each path. */
struct store_free {
    uint32_t group[STORE_PATHS_MAX]; /* paths of one file system share a group */
    uint64_t bytes[STORE_PATHS_MAX]; /* of each group; UINT64_MAX: not asked */
};
/* Gives every extent its path and offset, and each path its bytes of extents. A pure function.
 * `room` NULL: only the configured limits count. `extents` NULL: only the sizes.
 * STK_ERR_NOSPACE: they do not fit; STK_ERR_NOMEM. */
stk_status store_place(const struct store_cfg *cfg, const struct store_free *room,
                       struct store_extent *extents, uint64_t path_bytes[STORE_PATHS_MAX],
                       struct stk_error *err);
uint32_t store_extent_room(const struct store_cfg *cfg, uint32_t extent);
uint32_t store_extent_class(const struct store_cfg *cfg, uint32_t extent);
/* One half of table.bin; 0: no durable steps. */
uint64_t store_half_bytes(const struct store_cfg *cfg);

/* --- store_table.c: on disk, see there -------------------------------------------------------- */

#define STORE_TABLE_FORMAT 1u
#define STORE_TABLE_FORMAT_MAX 100u /* beyond it is no later program's, but damage */
#define STORE_TABLE_PATH_BYTES 512u
#define STORE_TABLE_CHECKSUMS 1u /* flag: the extents carry checksums */
#define STORE_TABLE_BYTES_MAX (4ull << 30)

struct store_table_head {
    char magic[8];
    uint32_t format, crc;
    uint64_t size_bytes, seq, step, payload_bytes;
    char run_id[24];
    uint32_t n_paths, n_extents, volatile_classes, room, flags;
    uint8_t zero[164];
};
struct store_table_extent {
    uint64_t payload_bytes, offset_bytes, version;
    uint32_t crc;
    uint8_t path, cls, slot, zero;
};
_Static_assert(sizeof(struct store_table_head) == 256, "the format has 256 bytes");
_Static_assert(sizeof(struct store_table_extent) == 32, "the format has 32 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tables are little-endian");

enum store_half_state {
    HALF_WHOLE,
    HALF_BLANK,  /* nothing was ever written, or it was withdrawn */
    HALF_BROKEN,
    HALF_UNKNOWN /* cannot be read, or of a later program: may hold something */
};
/* Bytes of a table before its payload. */
uint64_t store_table_fixed_bytes(uint32_t n_paths, uint32_t n_extents);
/* Any bytes: what is wrong with them goes to `why`. `half` holds the first `have_bytes` of the
 * half. */
enum store_half_state store_table_check(const uint8_t *half, uint64_t have_bytes,
                                        const char *run_id, char *why, size_t why_bytes);
static inline const char *store_table_path(const uint8_t *table, uint32_t k)
{
    return (const char *)table + sizeof(struct store_table_head) +
           (uint64_t)k * STORE_TABLE_PATH_BYTES;
}
static inline const struct store_table_extent *store_table_extents(const uint8_t *table)
{
    const struct store_table_head *h = (const void *)table;
    return (const void *)(table + sizeof *h + (uint64_t)h->n_paths * STORE_TABLE_PATH_BYTES);
}
/* Application's thread, at open: reserves the buffer and writes into it what stays the same. */
stk_status store_table_open(struct store *s, struct stk_error *err);
void store_table_close(struct store *s);

/* --- store_files.c ---------------------------------------------------------------------------- */

/* Removes what dead runs left, checks room, places the extents, makes folders, locks and files. On
 * error the caller calls store_files_close, which takes back whatever was made. */
stk_status store_files_make(struct store *s, const struct store_cfg *cfg, struct stk_error *err);
/* Adds the files to the io. */
stk_status store_files_add(struct store *s, struct stk_error *err);
/* An error names the folders that should have been removed and are still there. */
stk_status store_files_close(struct store *s, struct stk_error *err);
/* Fills folder, file and table of a path; `k`: its number in the set. */
stk_status store_path_name(struct store *s, struct store_path *p, uint32_t k,
                           struct stk_error *err);
/* Gives each device under the paths a drive number, and asks what is free there. */
stk_status store_drives(struct store *s, struct store_free *room, struct stk_error *err);

/* A path as the store keeps it: absolute. NULL: no memory. */
char *store_path_text(const struct store *s, const char *path);
bool store_is_run_folder(const char *name);
/* Opens the path's folder and waits for its lock: under it run folders appear and go. */
/* What to do about an error of the system; NULL: nothing is known. */
const char *store_hint(int os_errno);
stk_status store_path_lock(const char *path, int *out_fd, struct stk_error *err);
/* Takes the lock of a run's folder, and waits for transfers that a killed process has left under way
 * (30 s at most). False: a live run holds it, transfers do not end, or it cannot be asked. True:
 * `*out_fd` holds the lock; -1: there is no lock file, or no locks on this file system. What the
 * holder wrote goes to `text`, on one line. */
bool store_run_lock(const char *folder, int *out_fd, char text[STORE_LOCK_TEXT_MAX]);
/* Makes the lock file of a folder (`flags` O_EXCL: there may be none yet) and takes it. */
stk_status store_lock_make(struct store_path *p, int flags, struct stk_error *err);
/* Writes this process into a lock's file. 0 or -1 + errno. */
int store_lock_write(int fd);
/* Removes the store's own files in a run's folder, then the folder. 0 or -1 + errno. `lock_fd` is the
 * folder's lock, or -1; it is closed, and -1, where the folder stays because of it. */
int store_folder_remove(const char *folder, struct io_sim_disk *disk, int *lock_fd);

/* Files of a real or a simulated disk, outside of any io; application's thread. */
bool store_file_size(struct io_sim_disk *disk, const char *name, uint64_t *out_bytes);
int64_t store_file_read(struct io_sim_disk *disk, const char *name, void *buf, uint64_t size_bytes,
                        uint64_t offset_bytes); /* bytes, or -1 + errno */
/* Written (size_bytes may be 0) and flushed: 0 or -1 + errno. */
int store_file_write(struct io_sim_disk *disk, const char *name, const void *buf,
                     uint64_t size_bytes, uint64_t offset_bytes);

/* --- store_reach.c ---------------------------------------------------------------------------- */

/* Application's thread, once the files are open. */
stk_status store_reach_take(struct store *s, struct stk_error *err);
/* Lane. STK_ERR_IO: the sentence names the path, what became of it, and what to do. */
stk_status store_reach_check(const struct store *s, struct stk_error *err);

/* --- store_find.c ----------------------------------------------------------------------------- */

/* What the tables of one run say, over all paths given. */
struct store_run {
    char run_id[STORE_RUN_ID_MAX];
    uint32_t n_folders;               /* paths that have its folder */
    char *folder[STORE_PATHS_MAX];    /* by path given; NULL: none there */
    uint32_t number[STORE_PATHS_MAX]; /* of that path in the run's set; STORE_PATHS_MAX: no file
                                       * of extents there */
    bool has_newest[STORE_PATHS_MAX]; /* the newest whole table lies there */
    uint8_t *table;                   /* the newest whole one; NULL: none */
    uint64_t half_bytes;
    uint32_t half;
    /* The newest one lies on a path where both halves could be read: as a table that counts is on
     * every path, no newer one does */
    bool sure;
    bool unknown, broken;             /* some half is */
    char why[640];                    /* each file and what is wrong with it */
};
/* Takes no locks. STK_ERR_NOMEM, or STK_OK with whatever was found. */
stk_status store_run_read(const char *const *paths, uint32_t n_paths, const char *run_id,
                          struct io_sim_disk *disk, struct store_run *out, struct stk_error *err);
void store_run_free(struct store_run *r);
stk_status store_adopt(struct store *s, const struct store_cfg *cfg, struct stk_error *err);

#endif
