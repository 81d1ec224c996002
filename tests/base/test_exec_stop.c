/* tests/base/test_exec_stop.c - execution where the system refuses what it takes, and where the process is
 * stopped for a while: neither is a stall. One test waits in real time, for a stop that it made. */
#include "base/sys.h"
#include "tests/base/exec_world.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* --- failures of the system ------------------------------------------------------------------- */

static stk_status open_world(enum exec_kind kind, struct stk_error *err)
{
    struct exec *ex = NULL;
    struct exec_lane *lane = NULL;
    struct exec_team *team = NULL;
    stk_status s = kind == EXEC_THREADS ? exec_open_threads(&ex, err) : exec_open_sim(1, &ex, err);
    if (s == STK_OK) s = exec_lane_open(ex, "one", &lane, err);
    if (s == STK_OK) s = exec_team_open(ex, "team", 3, &team, err);
    exec_team_close(team);
    exec_close(ex);
    return s;
}

BOTH(each_failed_call_is_reported_and_leaves_nothing)
{
    static const enum sys_call calls[] = { SYS_ALLOC, SYS_THREAD };
    uint64_t before = sys_alloc_bytes();
    for (int c = 0; c < 2; c++) {
        uint32_t failures = 0;
        for (uint64_t k = 1; k < 20; k++) {
            struct stk_error err = { 0 };
            sys_fault_arm(calls[c], k, 1, EAGAIN);
            stk_status s = open_world(kind, &err);
            bool hit = sys_fault_seen(calls[c]) >= k;
            sys_fault_arm(calls[c], 0, 0, 0);
            CHECK((s == STK_OK) == !hit);
            CHECK(!hit || (s == STK_ERR_NOMEM && err.os_errno == EAGAIN));
            CHECK(sys_alloc_bytes() == before);
            failures += hit;
        }
        CHECK(failures == (calls[c] == SYS_ALLOC ? 6 : kind == EXEC_THREADS ? 4 : 0));
    }
}

/* --- a process that is stopped ---------------------------------------------------------------- */

/* A world in which every wait takes its whole time, and one of them much more: the clock went on
 * while the process did not. */
struct stopped {
    struct exec base;
    uint64_t now_ns;
    uint32_t waits, stop_at, set_at;
};

static uint64_t stopped_now_ns(const struct exec *ex) { return ((const struct stopped *)ex)->now_ns; }

static stk_status stopped_wait(struct exec_event *ev, uint64_t deadline_ns, struct stk_error *err)
{
    struct stopped *s = (struct stopped *)ev->ex;
    s->waits++;
    if (deadline_ns > s->now_ns) s->now_ns = deadline_ns;
    if (s->waits == s->stop_at) s->now_ns += 1000 * 1000000000ull;
    if (s->waits == s->set_at) return STK_OK;
    return stk_error_set(err, STK_ERR_STALLED, 0, "late");
}

TEST(exec_time_in_which_a_process_was_stopped_is_not_waited)
{
    static const struct exec_ops ops = { .kind = EXEC_THREADS, .now_ns = stopped_now_ns,
                                         .event_wait = stopped_wait };
    const uint64_t limit_ns = 120 * 1000000000ull;
    for (uint32_t stop_at = 1; stop_at <= 60; stop_at++) {
        struct stopped s = { .base.ops = &ops, .stop_at = stop_at, .set_at = 62 };
        struct stk_error err = { 0 };
        struct exec_event ev;
        exec_event_init(&s.base, &ev);
        CHECK_OK(exec_event_wait_running(&ev, limit_ns, &err), &err);
        s = (struct stopped){ .base.ops = &ops, .stop_at = stop_at };
        CHECK(exec_event_wait_running(&ev, limit_ns, &err) == STK_ERR_STALLED);
        CHECK(!strcmp(err.text, "late"));
        CHECK(s.now_ns == limit_ns + 1000 * 1000000000ull); /* in all, without the stop, the limit */
    }
}

BOTH(a_limit_of_running_time_ends)
{
    struct exec *ex = open_kind(kind, 3);
    struct exec_lane *lane = open_lane(ex, "l");
    struct stk_error err = { 0 };
    struct exec_event ev;
    exec_event_init(ex, &ev);
    uint64_t begin = exec_now_ns(ex);
    CHECK(exec_event_wait_running(&ev, 3000000, &err) == STK_ERR_STALLED && strstr(err.text, "l (ran"));
    /* the simulation knows at once that nothing can happen */
    CHECK(kind == EXEC_SIM ? exec_now_ns(ex) == begin : exec_now_ns(ex) >= begin + 3000000);
    exec_event_set(&ev);
    CHECK_OK(exec_event_wait_running(&ev, 0, NULL), &err);
    exec_lane_close(lane);
    exec_close(ex);
}

/* The real thing: a process is stopped for longer than the limit, then goes on and is done soon. */
struct frozen {
    struct exec_lane *lane;
    struct exec_task begin, end;
    struct exec_event done;
    int go_on;
};

static void frozen_end(void *arg) { exec_event_set(&((struct frozen *)arg)->done); }

static void frozen_begin(void *arg)
{
    struct frozen *f = arg;
    char c;
    kill(getpid(), SIGSTOP);
    while (read(f->go_on, &c, 1) < 0) continue; /* the parent writes when it has let us go on */
    exec_post_at(f->lane, &f->end, exec_now_ns(exec_of(f->lane)) + 50000000);
}

static int frozen_child(int go_on)
{
    struct frozen f = { .go_on = go_on };
    struct exec *ex = open_kind(EXEC_THREADS, 0);
    f.lane = open_lane(ex, "f");
    exec_event_init(ex, &f.done);
    exec_task_init(&f.begin, frozen_begin, &f);
    exec_task_init(&f.end, frozen_end, &f);
    exec_post(f.lane, &f.begin);
    stk_status st = exec_event_wait_running(&f.done, 400000000, NULL);
    exec_event_wait(&f.done, UINT64_MAX, NULL); /* in any case, for the lane's sake */
    exec_close(ex);
    return st == STK_OK ? 0 : 1;
}

TEST(exec_a_real_stop_is_no_stall)
{
    int ends[2], status = 0;
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) _exit(frozen_child(ends[0]));
    REQUIRE(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    struct timespec stop = { 0, 600000000 }; /* beyond the child's limit, by its clock */
    while (nanosleep(&stop, &stop) != 0) continue;
    CHECK(kill(child, SIGCONT) == 0 && write(ends[1], "x", 1) == 1);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(ends[0]);
    close(ends[1]);
}

TEST_MAIN()
