/* tests/python/fork_host.c - a trainer for test_fork_host.py: the example's network
 * (examples/c/mlp.c) on libstoker, with the batches from outside, as a Python program has it that
 * embeds the library. Every call returns a stk_status. */
int mlp_main(int argc, char **argv);
#define main mlp_main
#include "examples/c/mlp.c"
#undef main

int host_open(const char *folder);
int host_step(const float *x, const int *label, double lr, double *loss_out);
int host_parameter(double *sum);
int host_child(void);
const char *host_error(void);
void host_close(void);

static struct mlp host;

int host_open(const char *folder)
{
    memset(&host, 0, sizeof host);
    host.rng = 7;
    return set_up(&host, folder);
}

int host_step(const float *x, const int *label, double lr, double *loss_out)
{
    stk_step s = { .lr = lr };
    int right;
    for (int i = 0; i < BATCH; i++) {
        host.label[i] = label[i];
        host.x[0][i][0] = x[2 * i];
        host.x[0][i][1] = x[2 * i + 1];
    }
    stk_status st = stk_step_begin(host.e, &s);
    for (int i = 0; i < LAYERS && st == STK_OK; i++) st = forward(&host, i);
    *loss_out = loss(&host, &right);
    for (int i = LAYERS; i-- > 0 && st == STK_OK;) st = backward(&host, i);
    return st == STK_OK ? stk_step_end(host.e, NULL) : st;
}

/* Of the first layer's master weights, in order. */
int host_parameter(double *sum)
{
    float v[2 * HIDDEN];
    stk_status st = stk_tensor_read(host.e, host.layer[0].w, STK_READ_MASTER, 0, 2 * HIDDEN, v,
                                    STK_F32);
    *sum = 0;
    for (int i = 0; i < 2 * HIDDEN && st == STK_OK; i++) *sum = *sum * 1.25 + v[i];
    return st;
}

/* In a child of fork: every call must be refused (STK_ERR_STATE), and closing must do nothing. How
 * many were not. */
int host_child(void)
{
    stk_step s = { .lr = 1 };
    stk_visit v;
    double sum;
    int wrong = (stk_step_begin(host.e, &s) != STK_ERR_STATE) +
                (stk_flush(host.e) != STK_ERR_STATE) +
                (stk_acquire(host.e, host.layer[0].block, STK_FORWARD, 0, &v) != STK_ERR_STATE) +
                (host_parameter(&sum) != STK_ERR_STATE);
    stk_close(host.e);
    return wrong;
}

const char *host_error(void) { return stk_error_text(host.e); }

void host_close(void)
{
    stk_close(host.e);
    host.e = NULL;
}
