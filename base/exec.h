/* base/exec.h - all waiting, hand-off and background work, with two backends.
 *
 * threads:    each lane is one OS thread; events are condition variables; time is CLOCK_MONOTONIC.
 * simulation: everything runs on the caller's one OS thread. While the caller waits for an event, a
 * seeded choice among the
 *             lanes that have work runs one task at a time; when no lane has work, the virtual
 *                     clock jumps to the next
 *             timer. A run is a function of its seed. There is no preemption: a task runs to its
 *                     end.
 *
 * Code above never creates threads, never sleeps, never uses mutexes for hand-off: it posts tasks
 * to lanes and waits for events. (Compute inside a task may use OpenMP.)
 *
 * LANE   a queue of tasks, run in FIFO order, one at a time, never two of the same lane at once.
 * TASK   caller-owned node; nothing is allocated by posting. A task that is already queued is not
 *        queued twice (exec_post returns false): "wake up and look" needs no counting. It may be
 *                posted again from inside its own fn.
 * EVENT  a manual-reset flag that the application's thread (not a lane) waits for.
 * TEAM   n lanes that share parallel-for jobs (the update team).
 * SOURCE something outside that brings completions (an io_uring). threads: a thread of its own
 * blocks in poll.
 *        simulation: polled, and blocked on only when nothing else can run.
 *
 * Rule of the simulation: exec_event_wait may be called from the application's thread only, never
 * inside a task. */
#ifndef BASE_EXEC_H
#define BASE_EXEC_H

#include "base/status.h"

struct exec;
struct exec_lane;
struct exec_team;

enum exec_kind { EXEC_THREADS, EXEC_SIM };

/* Opens an execution world. Owned by the caller; exec_close frees it. Not thread safe against
 * itself. */
stk_status exec_open_threads(struct exec **out, struct stk_error *err);
stk_status exec_open_sim(uint64_t seed, struct exec **out, struct stk_error *err);
/* Drains and joins every lane, then frees: what may run runs, what waits for its time
 * (exec_post_at) is dropped, here and in exec_lane_close. All sources and teams must have been
 * removed. NULL is allowed. */
void exec_close(struct exec *ex);
enum exec_kind exec_kind_of(const struct exec *ex);

/* Nanoseconds, monotonic (threads) or virtual (simulation; starts at 0). Any thread. */
uint64_t exec_now_ns(const struct exec *ex);

/* Simulation: running hash over every decision taken (lane chosen, virtual time). Two runs of one
 * seed are equal in it after every step. 0 with threads. */
uint64_t exec_trace_hash(const struct exec *ex);

/* --- lanes and tasks -------------------------------------------------------------------------- */

struct exec_task {
    void (*fn)(void *arg);
    void *arg;
    /* below: private to exec.c, zero before the first post */
    struct exec_task *next;
    struct exec_lane *lane;
    uint64_t due_ns;
    uint32_t state;
};

static inline void exec_task_init(struct exec_task *t, void (*fn)(void *), void *arg)
{
    *t = (struct exec_task){ .fn = fn, .arg = arg };
}

/* `name` is copied (15 characters are kept). Owned by `ex`; closed with it or by exec_lane_close,
 * which runs what is queued, then ends the lane (application's thread only). threads: starts one OS
 * thread with all signals blocked. */
stk_status exec_lane_open(struct exec *ex, const char *name, struct exec_lane **out,
                          struct stk_error *err);
void exec_lane_close(struct exec_lane *lane);
struct exec *exec_of(const struct exec_lane *lane);

/* Any thread. False: it was queued already (and will run once, after this call). What was written
 * before the post is visible to fn. The task memory must live until fn has begun for the last
 * time. */
bool exec_post(struct exec_lane *lane, struct exec_task *task);
/* As exec_post, but not before `due_ns` on exec_now_ns's clock. Due tasks of one instant keep
 * posting order. */
bool exec_post_at(struct exec_lane *lane, struct exec_task *task, uint64_t due_ns);
/* Takes back a task that has not begun. True: it will not run. Call from the task's own lane or
 * before start. */
bool exec_cancel(struct exec_task *task);
/* True inside a task of this lane. For assertions ("only the engine lane touches chunks"). */
bool exec_on_lane(const struct exec_lane *lane);

/* Simulation only (no effect with threads), inside a task of `lane`: this lane's next task does not
 * begin before now + busy_ns. Models the time of work done in this task; signal its completion from
 * a following task of the same lane. */
void exec_lane_busy(struct exec_lane *lane, uint64_t busy_ns);
/* What a simulated machine has only once, and parts of it (0 to 1) that a piece of work takes while it
 * goes at full speed. */
enum exec_share { EXEC_SHARE_DRAM, EXEC_SHARE_LINK, EXEC_SHARE_DRIVE, EXEC_SHARES };
struct exec_need {
    double part[EXEC_SHARES];
    double weight; /* while others want the DRIVE, too: its part of the speed; 0: 1 */
};
/* As exec_lane_busy, for work that takes busy_ns alone; while the parts of all work under way add up to
 * more than there is, all that use the short one slow down alike (max-min fair, as in
 * engine/predict.c). At most once in a task. */
void exec_lane_busy_sharing(struct exec_lane *lane, uint64_t busy_ns, const struct exec_need *need);
/* Simulation: time for which a share was in full use, or twice that for which half of it was. */
uint64_t exec_share_used_ns(const struct exec *ex, enum exec_share share);
/* Simulation: the lane whose task runs, NULL outside of tasks (for exec_lane_busy inside a team's
 * slice: `done` then follows when the slice's time is over). NULL with threads. */
struct exec_lane *exec_lane_current(const struct exec *ex);

/* --- events: how the application's thread waits ----------------------------------------------- */

struct exec_event {
    struct exec *ex;
    uint32_t set; /* private, atomic */
};
void exec_event_init(struct exec *ex, struct exec_event *ev);
void exec_event_set(struct exec_event *ev);   /* any thread or task; wakes waiters */
void exec_event_reset(struct exec_event *ev); /* by the waiter, before it asks for what will set
                                               * it */
bool exec_event_is_set(const struct exec_event *ev);
/* Blocks until set (STK_OK) or until exec_now_ns reaches deadline_ns (STK_ERR_STALLED; UINT64_MAX:
 * no deadline). Simulation: runs lanes meanwhile; when nothing is runnable, no timer is due ever
 * and no source is left, returns STK_ERR_STALLED at once with the names of the lanes: a lost
 * completion is found, not waited for. */
stk_status exec_event_wait(struct exec_event *ev, uint64_t deadline_ns, struct stk_error *err);
/* The same with a limit of time in which this process ran: while it is stopped (SIGSTOP, a debugger, a
 * frozen cgroup, a machine that sleeps) the clock may go on and nothing else does, so that time is not
 * held against what is waited for. Looks at the clock in parts of the limit, and of no part counts more
 * than its length. */
stk_status exec_event_wait_running(struct exec_event *ev, uint64_t limit_ns, struct stk_error *err);

/* --- teams ------------------------------------------------------------------------------------ */

/* A parallel-for: fn(arg, slice, n_slices) once for every slice in [0, n_slices), on any member, in
 * any order; when all have returned `done` is posted to `done_lane`. Caller-owned; may be reused
 * after `done` began. Jobs begin in the order given. A job does not overlap with those before it and may
 * read what they wrote; but one that is `beside` shares nothing with the jobs that are not done when it is
 * given, and a member that finds no slice left of those takes one of it instead of waiting. */
struct exec_team_job {
    void (*fn)(void *arg, uint32_t slice, uint32_t n_slices);
    void *arg;
    uint32_t n_slices;
    bool beside;
    struct exec_lane *done_lane;
    struct exec_task *done;
    /* private */
    struct exec_team_job *next;
    uint32_t next_slice, left;
};
stk_status exec_team_open(struct exec *ex, const char *name, uint32_t members,
                          struct exec_team **out, struct stk_error *err);
/* Each member runs fn(arg) once, before any slice of a job given later. Once in a team's life; by who opened
 * it. */
void exec_team_begin(struct exec_team *team, void (*fn)(void *arg), void *arg);
void exec_team_close(struct exec_team *team);
uint32_t exec_team_members(const struct exec_team *team);
void exec_team_run(struct exec_team *team, struct exec_team_job *job);

/* --- sources ---------------------------------------------------------------------------------- */

/* poll(arg, block): takes what has arrived and posts tasks; returns how many things it took. With
 * block = true it may wait until something arrives or wake(arg) is called from another thread.
 * idle(arg): true while nothing is outstanding (the simulation does not ask an idle source). All
 * three are required. */
struct exec_source {
    uint32_t (*poll)(void *arg, bool block);
    void (*wake)(void *arg);
    bool (*idle)(void *arg);
    void *arg;
    void *priv; /* private to exec.c */
};
stk_status exec_source_add(struct exec *ex, const char *name, struct exec_source *src,
                           struct stk_error *err);
void exec_source_remove(struct exec *ex, struct exec_source *src); /* wakes it, joins its thread */

#endif
