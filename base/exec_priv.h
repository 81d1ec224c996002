/* base/exec_priv.h - private to base/exec*.c: the queue of a lane and the table that both backends
 * fill.
 *
 * A backend's own structs begin with struct exec and struct exec_lane, so that a pointer to one
 * is a pointer to the other. */
#ifndef BASE_EXEC_PRIV_H
#define BASE_EXEC_PRIV_H

#include "base/exec.h"

enum { EXEC_NAME_MAX = 16 };

/* Tasks that may run, in order, and tasks that wait for their time, by due_ns and then by
 * posting order. Threads: under the lane's mutex. */
struct exec_queue {
    struct exec_task *first, *last;
    struct exec_task *due;
    uint64_t pushed; /* tasks that ever became runnable */
};

struct exec_lane {
    struct exec *ex;
    struct exec_lane *next; /* in the order of opening */
    uint32_t index;         /* number of lanes opened before it */
    char name[EXEC_NAME_MAX];
    struct exec_queue queue;
    uint64_t ran;   /* tasks begun */
    bool no_timers; /* closing: what is not due yet is dropped */
};

/* What differs between the backends; the public calls of the same names are thin. */
struct exec_ops {
    enum exec_kind kind;
    void (*close)(struct exec *ex);
    uint64_t (*now_ns)(const struct exec *ex);
    /* allocates; exec.c then sets name and index and calls lane_start */
    stk_status (*lane_open)(struct exec *ex, struct exec_lane **out, struct stk_error *err);
    stk_status (*lane_start)(struct exec_lane *lane, struct stk_error *err);
    void (*lane_close)(struct exec_lane *lane); /* already out of the list; frees it */
    /* the task's state is QUEUED already */
    void (*push)(struct exec_lane *lane, struct exec_task *task, bool timed);
    bool (*remove)(struct exec_lane *lane, struct exec_task *task);
    bool (*on_lane)(const struct exec_lane *lane);
    void (*event_set)(struct exec_event *ev);
    stk_status (*event_wait)(struct exec_event *ev, uint64_t deadline_ns, struct stk_error *err);
    stk_status (*source_add)(struct exec *ex, const char *name, struct exec_source *src,
                             struct stk_error *err);
    void (*source_remove)(struct exec *ex, struct exec_source *src);
};

struct exec {
    const struct exec_ops *ops;
    struct exec_lane *lanes; /* application's thread only, like opening and closing */
    uint32_t n_opened;
};

enum { EXEC_TASK_IDLE = 0, EXEC_TASK_QUEUED = 1 };

void exec_queue_push(struct exec_queue *q, struct exec_task *task);
void exec_queue_push_due(struct exec_queue *q, struct exec_task *task);
/* Moves what is due behind what may run. */
void exec_queue_promote(struct exec_queue *q, uint64_t now_ns);
struct exec_task *exec_queue_pop(struct exec_queue *q); /* NULL: nothing may run */
bool exec_queue_remove(struct exec_queue *q, struct exec_task *task);
void exec_queue_drop_due(struct exec_queue *q);

/* Marks a popped task as not queued, then runs it: from here on it may be posted again, or freed
 * by its own fn. */
void exec_task_run(struct exec_task *task);

/* "engine (ran 12, 1 queued), io (ran 3)" into buf: for sentences about a stall. */
void exec_describe_lanes(const struct exec *ex, char *buf, size_t size_bytes);

#endif
