/* base/exec_team.c - parallel-for jobs over ordinary lanes, the same code over both backends.
 *
 * Owns: the members' lanes and the list of jobs (the jobs themselves are the callers').
 * Must not know: what a slice does; which backend runs it.
 * Thread: exec_team_run from any; a member's task runs one slice, then queues itself again, and
 * accounts for the slice when it begins anew: so in the simulation a slice that made its lane
 * busy ends only when that time is over. */
#include "base/exec.h"
#include "base/sys.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>

struct member {
    struct exec_team *team;
    struct exec_lane *lane;
    struct exec_task task, begin;
    struct exec_team_job
        *ran; /* a slice of it has returned and is not accounted for; own lane only */
};

struct exec_team {
    struct exec *ex;
    pthread_mutex_t mutex;              /* what follows; never held while a slice runs */
    struct exec_team_job *first, *last; /* in the order given; none before `first` has slices left */
    struct exec_event *idle;            /* to set when the list is empty; NULL: nobody waits */
    uint32_t n_members;
    struct member member[];
};

/* The first job with slices to hand out: the first of the list, or one that is `beside`. Under the
 * mutex. */
static struct exec_team_job *open_job(const struct exec_team *team)
{
    struct exec_team_job *job = team->first;
    while (job && job->next_slice == job->n_slices) {
        job = job->next;
        if (job && !job->beside) return NULL;
    }
    return job;
}

/* Wakes as many members as the job has slices for. Under the mutex: a job may end, and the team be
 * closed, before a caller has woken its last member; who closes takes the mutex first and so finds
 * nobody on the way to a lane. */
static void wake_members(struct exec_team *team, const struct exec_team_job *job)
{
    for (uint32_t i = 0; job && i < team->n_members && i < job->n_slices - job->next_slice; i++)
        exec_post(team->member[i].lane, &team->member[i].task);
}

/* Takes finished jobs off the list, in its order, and starts what may begin now. Under the mutex. */
static void finish_jobs(struct exec_team *team)
{
    while (team->first && team->first->left == 0) {
        struct exec_team_job *job = team->first;
        team->first = job->next;
        /* the job is its caller's again once `done` begins */
        if (job->done) exec_post(job->done_lane, job->done);
    }
    wake_members(team, open_job(team));
    if (team->first) return;
    team->last = NULL;
    if (team->idle) exec_event_set(team->idle);
}

static struct exec_team_job *take_slice(struct exec_team *team, uint32_t *slice)
{
    pthread_mutex_lock(&team->mutex);
    struct exec_team_job *job = open_job(team);
    if (job) *slice = job->next_slice++;
    if (job && job->next_slice == job->n_slices) wake_members(team, open_job(team));
    pthread_mutex_unlock(&team->mutex);
    return job;
}

static void run_member(void *arg)
{
    struct member *m = arg;
    if (m->ran) {
        pthread_mutex_lock(&m->team->mutex);
        if (--m->ran->left == 0) finish_jobs(m->team);
        pthread_mutex_unlock(&m->team->mutex);
        m->ran = NULL;
    }
    uint32_t slice = 0;
    struct exec_team_job *job = take_slice(m->team, &slice);
    if (!job) return;
    job->fn(job->arg, slice, job->n_slices);
    m->ran = job;
    exec_post(m->lane, &m->task);
}

void exec_team_run(struct exec_team *team, struct exec_team_job *job)
{
    STK_ASSERT(job->fn && (!job->done || job->done_lane));
    job->next = NULL;
    job->next_slice = 0;
    job->left = job->n_slices;
    pthread_mutex_lock(&team->mutex);
    if (team->last) team->last->next = job;
    else team->first = job;
    team->last = job;
    if (team->first == job) finish_jobs(team);
    else if (open_job(team) == job) wake_members(team, job);
    /* else whoever finishes the jobs before starts this one */
    pthread_mutex_unlock(&team->mutex);
}

stk_status exec_team_open(struct exec *ex, const char *name, uint32_t members,
                          struct exec_team **out, struct stk_error *err)
{
    *out = NULL;
    if (members == 0)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "team %s: at least one member is needed, not 0", name);
    struct exec_team *team = sys_calloc(1, sizeof *team + (size_t)members * sizeof team->member[0]);
    if (!team)
        return stk_error_set(err, STK_ERR_NOMEM, errno, "team %s: no memory for %u members", name,
                             members);
    team->ex = ex;
    pthread_mutex_init(&team->mutex, NULL);
    for (uint32_t i = 0; i < members; i++) {
        struct member *m = &team->member[i];
        char lane_name[32];
        snprintf(lane_name, sizeof lane_name, "%.10s.%u", name, i);
        m->team = team;
        exec_task_init(&m->task, run_member, m);
        stk_status status = exec_lane_open(ex, lane_name, &m->lane, err);
        if (status != STK_OK) {
            exec_team_close(team);
            return status;
        }
        team->n_members = i + 1;
    }
    *out = team;
    return STK_OK;
}

/* Lanes are FIFO: before whatever is posted from now on. Closing a lane runs what is queued. */
void exec_team_begin(struct exec_team *team, void (*fn)(void *arg), void *arg)
{
    for (uint32_t i = 0; i < team->n_members; i++) {
        exec_task_init(&team->member[i].begin, fn, arg);
        exec_post(team->member[i].lane, &team->member[i].begin);
    }
}

void exec_team_close(struct exec_team *team)
{
    if (!team) return;
    struct exec_event idle;
    exec_event_init(team->ex, &idle);
    pthread_mutex_lock(&team->mutex);
    bool wait = team->first != NULL;
    if (wait) team->idle = &idle;
    pthread_mutex_unlock(&team->mutex);
    if (wait) (void)exec_event_wait(&idle, UINT64_MAX, NULL);
    for (uint32_t i = 0; i < team->n_members; i++) exec_lane_close(team->member[i].lane);
    pthread_mutex_destroy(&team->mutex);
    sys_free(team);
}

uint32_t exec_team_members(const struct exec_team *team) { return team->n_members; }
