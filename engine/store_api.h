/* engine/store_api.h - what the files of the public extent store share (engine/stoker.h,
 * stk_store_*): store_api.c (calls), store_buffers.c (buffers and transfers), store_durable.c
 * (commits). Private to them.
 *
 * A BUFFER holds one item and is as large as the largest one, rounded to 4096. Its state belongs to
 * the application's thread alone:
 *
 *     FREE --swap_begin(read)--> READING --land--> CLEAN --put--> WRITING --land--> CLEAN
 *     FREE --swap_begin(put)---> WRITING      READING --land, failed--> BAD
 *     CLEAN, BAD --take_buffer (the one used longest ago)--> another item's
 *
 * INV-1  An item is in at most one buffer; what is there in CLEAN or WRITING is its newest bytes.
 * INV-2  A buffer in READING or WRITING is touched by no item but its own, and written to by nobody
 *        but the transfer.
 * INV-3  Of one item at most one transfer is under way (the store asserts it).
 * INV-4  With no transfer under way every buffer can be taken: whoever waits for room is served.
 *
 * A TRANSFER is handed to the lane as a task; the lane calls the store and, when the operation is
 * done, pushes the transfer on a stack that the application's thread empties (swap_harvest).
 * Nothing else is shared between the two threads. Nothing is allocated after open. */
#ifndef ENGINE_STORE_API_H
#define ENGINE_STORE_API_H

#include "base/exec.h"
#include "engine/stoker.h"
#include "nvme/store.h"

#include <stdatomic.h>
#include <sys/types.h>

#define SWAP_TRANSFERS_MAX 128u   /* puts and gets under way at once */
#define SWAP_BUFFERS_DEFAULT 8u
#define SWAP_PAYLOAD_DEFAULT 4096u
#define SWAP_STALL_NS (120ull * 1000000000u)      /* a wait without any progress ends */
#define SWAP_CLOSE_STALL_NS (30ull * 1000000000u) /* patience of close */
#define SWAP_NONE UINT32_MAX
#define SWAP_NEVER UINT64_MAX     /* version of an item that was never put */

enum swap_state { SWAP_FREE, SWAP_CLEAN, SWAP_BAD, SWAP_READING, SWAP_WRITING };

struct swap_buffer {
    uint8_t *mem;                 /* BAD: holds the struct stk_error of the read that failed */
    struct swap_buffer *next, *prev; /* in `empty`, `used` or `ahead`; in none with a transfer */
    uint64_t turn;                /* s->turns when it was prefetched */
    uint32_t item;                /* SWAP_NONE: FREE */
    enum swap_state state;
    bool wanted;                  /* prefetched, and neither got nor put since */
};

struct swap_list { struct swap_buffer *first, *last; };

struct swap_transfer {
    struct store_op op;           /* the lane's while under way */
    struct exec_task task;
    stk_store *s;
    struct swap_buffer *buffer;   /* NULL: straight into the caller's memory */
    struct swap_transfer *next;   /* of the free ones, or of the stack */
    uint64_t begun_ns;
    bool put, under_way;
};

struct stk_store {
    stk_store_config cfg;
    char *paths[STK_NVME_MAX];
    uint32_t n_paths;
    pid_t pid;                    /* of who opened it: a child of fork may not use it */
    bool opened, reported;        /* reported: the caller has been told of `fail` */
    struct stk_error err;         /* of the last failed call */
    struct stk_error fail;        /* why the store is FAILED, or was not opened */
    char *description;

    struct exec *ex;
    struct exec_lane *lane;
    struct io *io;
    struct store *store;
    struct exec_task notify;      /* io has something to reap */

    /* application's thread */
    uint64_t *item_bytes;
    uint64_t *versions;           /* of each item's newest put; SWAP_NEVER */
    uint32_t *buffer_of;          /* index of the buffer that holds the item, or SWAP_NONE */
    uint8_t *memory;
    uint64_t buffer_bytes;        /* of one */
    uint64_t memory_bytes, table_bytes;
    struct swap_buffer *buffers;
    uint32_t n_buffers, n_wanted, wanted_max, n_writing;
    uint32_t latest;              /* item got last and not put since; SWAP_NONE */
    struct swap_list empty, used, ahead; /* used, ahead: longest ago first */
    struct swap_transfer *transfers, *idle;
    uint32_t n_transfers, n_under_way;
    uint64_t turns;               /* gets and puts so far: the age of what was prefetched */
    bool direct_landed;
    stk_store_stats stats;

    /* between the lane and the application's thread */
    _Atomic(struct swap_transfer *) landed;
    struct exec_event progress;   /* set by the lane after whatever it finished */

    struct io_req flushes[STK_NVME_MAX];
    struct exec_task flush_task;
    _Atomic uint32_t flushes_left;
    struct stk_error flush_error; /* the lane's until flushes_left is 0 */

    /* durable steps */
    struct store_commit commit;
    struct exec_task commit_task;
    _Atomic bool committing;
    bool durable;                 /* step and payload hold */
    uint64_t step;
    uint8_t *payload;             /* payload_max bytes */
    uint64_t payload_bytes, payload_max;
};

static inline uint64_t swap_round(uint64_t n)
{
    return (n + STORE_ALIGN - 1) & ~(uint64_t)(STORE_ALIGN - 1);
}

/* --- store_buffers.c; application's thread ---------------------------------------------------- */

/* Links buffers and transfers that have been allocated. */
void swap_buffers_init(stk_store *s);
/* Takes what the lane has finished; how many. */
uint32_t swap_harvest(stk_store *s);
/* [waits] Until the lane has finished something more. STK_ERR_STALLED, and the store is FAILED,
 * after SWAP_STALL_NS: `call` and `item` (or SWAP_NONE) are for the sentence. */
stk_status swap_wait(stk_store *s, const char *call, uint32_t item);
/* The buffer that holds `item`, or NULL. */
struct swap_buffer *swap_find(stk_store *s, uint32_t item);
/* A buffer for `item`, in no list: an empty one, else the one used longest ago, else, with no write
 * under way, one that was prefetched and not used yet. NULL: there is something to wait for.
 * `spare`: never what was prefetched or got last. */
struct swap_buffer *swap_take(stk_store *s, uint32_t item, bool spare);
/* Takes the item's own buffer out of its list, to be written to. */
void swap_claim(stk_store *s, struct swap_buffer *b);
/* A CLEAN or BAD one was used: it is now the last to be taken. */
void swap_touch(stk_store *s, struct swap_buffer *b);
/* It holds nothing any more. Not with a transfer. */
void swap_drop(stk_store *s, struct swap_buffer *b);
/* What was prefetched long ago and never asked for stops to count as wanted. */
void swap_forget_stale(stk_store *s);
/* Hands a transfer of `item` to the lane; there must be an idle one. `b` NULL: a get into
 * `direct`. */
void swap_begin(stk_store *s, uint32_t item, bool put, enum io_class cls, struct swap_buffer *b,
                void *direct);

/* --- store_durable.c; application's thread ---------------------------------------------------- */

/* Before the store is opened with `adopt`: keeps step and payload of what is there. */
stk_status swap_adopt(stk_store *s, struct io_sim_disk *disk, struct stk_error *err);

/* --- store_api.c ------------------------------------------------------------------------------ */

/* Refuses a call on what cannot be used: NULL, not opened, FAILED, a child of fork. */
stk_status swap_enter(stk_store *s, const char *call);
/* After a wait: the failure of an earlier put, if there is one. */
stk_status swap_failed(stk_store *s);

#endif
