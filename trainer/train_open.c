/* trainer/train_open.c - opens a training run and refuses what cannot work, before anything is
 * written: options, model, data, what lies in --out, the checkpoint to go on from, the engine's
 * budgets and disks.
 *
 * Must not know: steps. Application's thread. */
#include "base/mem.h"
#include "base/sys.h"
#include "trainer/hf_out.h"
#include "trainer/train.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static stk_status count_steps(struct train *t, struct stk_error *err)
{
    const struct run_opts *o = &t->o;
    t->n_windows = tokens_windows(t->r.data, o->seq);
    t->steps = o->steps;
    if (!o->steps) {
        double steps = floor((double)t->n_windows * o->epochs / (double)o->batch);
        if (steps < 1)
            return stk_error_set(err, STK_ERR_CONFIG, 0,
                                 "--epochs %g of %" PRIu64
                                 " windows is less than one batch of %" PRIu64
                                 ": give more epochs or a smaller --batch",
                                 o->epochs, t->n_windows, o->batch);
        t->steps = (uint64_t)steps;
    }
    if (o->warmup > t->steps)
        return stk_error_set(err, STK_ERR_CONFIG, 0,
                             "--warmup %" PRIu64 " is longer than the run of %" PRIu64 " steps",
                             o->warmup, t->steps);
    return STK_OK;
}

/* The first window with a target, so that a mask that hides everything is refused before anything
 * is written. */
static stk_status check_targets(struct train *t, struct stk_error *err)
{
    uint64_t seq = t->o.seq, n = 0;
    int32_t *v = sys_calloc(4 * seq, sizeof *v);
    if (!v)
        return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a window of %" PRIu64 " tokens",
                             seq);
    stk_status st = STK_OK;
    for (uint64_t w = 0; w < t->n_windows && n == 0 && st == STK_OK; w++)
        st = tokens_window(t->r.data, seq, w, v, v + seq, v + 2 * seq, v + 3 * seq, &n, err);
    sys_free(v);
    if (st != STK_OK || n > 0) return st;
    return stk_error_set(
        err, STK_ERR_CONFIG, 0,
        "--data %s: no window holds a target: the loss mask leaves nothing to learn", t->o.data);
}

/* Two runs that write to one --out would spoil each other's checkpoints and model. The lock goes
 * with the process and leaves no file; where folders cannot be locked (some network disks) there is
 * none. */
stk_status train_lock_out(struct train *t, struct stk_error *err)
{
    if (t->out_lock > 0) return STK_OK;
    int fd = sys_open(t->o.out, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return STK_OK; /* is made later, or cannot be: said there */
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        sys_close(fd);
        t->had_out = t->had_ckpt_dir = true; /* the other run's: nothing of them is removed */
        return stk_error_set(
            err, STK_ERR_STATE, 0,
            "--out %s: another run is writing there: wait for it or choose another "
            "folder",
            t->o.out);
    }
    t->out_lock = fd;
    return STK_OK;
}

static stk_status check_paths(struct train *t, struct stk_error *err)
{
    const struct run_opts *o = &t->o;
    STK_TRY(run_check_output(o, "--log", o->log, true, err));
    STK_TRY(run_check_output(o, "--plan", o->plan, true, err));
    STK_TRY(run_check_output(o, "--trace", o->trace, true, err));
    STK_TRY(run_check_output(o, "--json", o->json, true, err));
    if (o->dump_gradients) STK_TRY(hf_check_writable("--dump-gradients", o->dump_gradients, err));
    if (!o->out) return STK_OK;
    t->ckpt_dir = sys_format("%s/checkpoints", o->out);
    if (!t->ckpt_dir) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a path");
    t->had_out = access(o->out, F_OK) == 0;
    t->had_ckpt_dir = access(t->ckpt_dir, F_OK) == 0;
    if (!o->dry_run && o->verb == FOR_TRAIN) STK_TRY(train_lock_out(t, err));
    return train_check_out(t, err);
}

static stk_status open_eval(struct train *t, struct stk_error *err)
{
    if (!t->o.eval_data) return STK_OK;
    STK_TRY(tokens_open(t->o.eval_data, t->r.src.cfg.vocab, &t->eval_data, err));
    return tokens_check_seq(t->eval_data, t->o.seq, err);
}

/* Bytes of one checkpoint before the engine can say (engine/checkpoint.c): 12 a trained parameter,
 * 2 a frozen one. */
static uint64_t save_bytes(const struct train *t)
{
    uint64_t sum = 65536;
    for (uint32_t i = 0; i < model_tensor_count(t->r.model); i++) {
        const struct model_tensor_info *info = model_tensor(t->r.model, i);
        sum += info->n_elems * (info->frozen ? 2 : 12) + 1024;
    }
    return sum;
}

static stk_status check_room(const struct train *t, struct stk_error *err)
{
    const struct run_opts *o = &t->o;
    if (!o->out) return STK_OK;
    uint64_t device, room = hf_room(o->out, &device), one = save_bytes(t),
                     model = hf_bytes(&t->r.src.cfg, t->r.src.both);
    bool saves = o->checkpoint_every || o->save_final_state;
    char a[32], b[32], c[32];
    mem_size_format(room, a);
    mem_size_format(one, b);
    mem_size_format(model, c);
    if (room < model + (saves ? one : 0))
        return stk_error_set(err, STK_ERR_NOSPACE, 0,
                             "--out %s: %s are free there; the finished model takes %s%s%s: free "
                             "space or choose another disk",
                             o->out, a, c, saves ? ", a checkpoint " : "", saves ? b : "");
    if (saves && room < model + one * (o->keep_checkpoints + 1))
        printf(
            "warning: --out %s has %s free; the model takes %s and %" PRIu64
            " checkpoints of %s are there at once while one is written: lower --keep-checkpoints\n",
            o->out, a, c, o->keep_checkpoints + 1, b);
    return STK_OK;
}

stk_status train_check_room(const struct train *t, struct stk_error *err)
{
    return check_room(t, err);
}

/* What a dead run left goes only when nothing can refuse this one: the engine, too, plans and
 * counts first (a plan that was only tried cannot become a run: it is opened anew). Only room on
 * the --nvme disks is judged when the dead run's files are gone: it may be what they take. */
static stk_status refuse_first(struct train *t, struct stk_error *err)
{
    if (train_left_discards(t)) {
        stk_status st = run_seal(&t->r, true, err);
        if (st != STK_OK && st != STK_ERR_NOSPACE) return st;
        stk_error_clear(err);
        run_close(&t->r);
        STK_TRY(run_open(&t->r, &t->o, false, false, err));
    }
    return train_left_discard(t, err);
}

/* Files that a run has open at once beyond its inputs. Per --nvme path: the lock, the extents, the
 * table, and the ring of its drive with the event that wakes it. The rest: --out's lock, the log, and
 * what is open together while the run ends or saves (the writer's file, the one it copies from or
 * reads again for its checksum, the folders that are listed and flushed), which must not be missing
 * after hours of training. */
enum { FILES_PER_PATH = 5, FILES_OF_RUN = 10, FILES_OF_INPUTS = 4 };

static stk_status check_files(const struct train *t, bool inputs, struct stk_error *err)
{
    const struct run_opts *o = &t->o;
    uint64_t paths = o->storage == STK_STORAGE_SIM ? 0 : o->nvme.n, now, limit,
             more = FILES_OF_RUN + FILES_PER_PATH * paths + (inputs ? FILES_OF_INPUTS : 0);
    if (sys_files_room(more, &now, &limit)) return STK_OK;
    return stk_error_set(err, STK_ERR_CONFIG, EMFILE,
                         "too many open files for this user's limit: the run needs %" PRIu64
                         " beside the %" PRIu64 " that are open (%" PRIu64
                         " --nvme paths), and the hard limit is %" PRIu64 ": raise it to at least "
                         "%" PRIu64 " with ulimit -n %" PRIu64,
                         more, now, paths, limit, now + more, now + more);
}

stk_status train_open(struct train *t, struct stk_error *err)
{
    if (!t->o.dry_run && t->o.verb == FOR_TRAIN) STK_TRY(check_files(t, true, err));
    STK_TRY(check_paths(t, err));
    STK_TRY(train_left_find(t, err));
    if (t->o.resume) STK_TRY(train_resume_find(t, err));
    STK_TRY(train_durable_name(t, err));
    STK_TRY(run_open(&t->r, &t->o, false, false, err));
    STK_TRY(count_steps(t, err));
    STK_TRY(check_targets(t, err));
    STK_TRY(open_eval(t, err));
    if (!t->o.dry_run && t->o.verb == FOR_TRAIN) STK_TRY(check_files(t, false, err));
    if (t->o.resume) STK_TRY(train_resume_check(t, err));
    STK_TRY(check_room(t, err));
    STK_TRY(token_order_new(t->n_windows, t->o.seed, &t->order, err));
    t->windows = sys_calloc(t->o.batch, sizeof *t->windows);
    if (!t->windows) return stk_error_set(err, STK_ERR_NOMEM, 0, "no memory for a batch");
    return refuse_first(t, err);
}

void train_close(struct train *t)
{
    report_close(&t->report);
    run_close(&t->r);
    if (t->failed && (t->trained || (t->damaged && t->resume_durable))) train_tell_left(t);
    train_durable_close(t);
    if (t->failed && t->ckpt_dir) { /* folders that we made and left empty */
        if (!t->had_ckpt_dir) rmdir(t->ckpt_dir);
        if (!t->had_out) rmdir(t->o.out);
    }
    if (t->eval_data) tokens_close(t->eval_data);
    token_order_free(t->order);
    sys_free(t->windows);
    if (t->out_lock > 0) sys_close(t->out_lock);
    sys_free(t->ckpt_dir);
    sys_free(t->resume_path);
    json_decref(t->resume_client);
}
