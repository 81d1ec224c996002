/* tests/gpu/cuda/test_device_dnn.c - attention of the CUDA device by cuDNN, on the stand-in, against the host device:
 * causal, grouped-query, windows, documents, odd lengths, in pieces; where own tiles take over; calls that fail; and
 * that the stand-in takes no descriptor that cuDNN's documentation refuses. */
#include "tests/test.h"
#include "tests/gpu/cuda/device_rig.h"
#include "tests/gpu/cuda/dnn_table.h"
#include "tests/gpu/kern_test.h"
#include <cudnn.h>

TEST_MAIN()

struct shape {
    uint64_t n_seq, seq, heads, kv_heads, dim, window, document; /* 0: none */
    enum ops_dtype at;
    bool grad_wide, tiles; /* own tiles are expected */
    int cc_major;
};
/* The last two are of several pieces: CUDA_DNN_PIECE_BYTES is 128 KiB here, and a head's scores take 32 or more. */
static const struct shape shapes[] = {
    { 1, 16, 2, 2, 8, 0, 0, OPS_BF16, false, false, 8 },   { 2, 33, 4, 2, 16, 0, 0, OPS_BF16, false, false, 8 },
    { 1, 67, 4, 1, 24, 9, 0, OPS_BF16, false, false, 9 },  { 2, 40, 2, 2, 32, 0, 11, OPS_BF16, false, false, 8 },
    { 1, 50, 6, 3, 8, 13, 17, OPS_BF16, false, false, 10 }, { 1, 2, 2, 1, 8, 0, 0, OPS_BF16, false, false, 8 },
    { 4, 37, 2, 2, 8, 5, 0, OPS_BF16, false, false, 8 },   { 2, 130, 4, 2, 8, 0, 60, OPS_BF16, false, false, 9 },
};
/* What cuDNN is not asked for, or has not. */
static const struct shape own[] = {
    { 1, 16, 2, 2, 12, 0, 0, OPS_BF16, false, true, 8 },  { 1, 16, 2, 2, 8, 0, 0, OPS_F32, false, true, 8 },
    { 1, 16, 2, 2, 8, 0, 0, OPS_BF16, true, true, 8 },    { 1, 16, 2, 2, 8, 0, 0, OPS_BF16, false, true, 7 },
    { 3, 1, 2, 2, 8, 0, 0, OPS_BF16, false, true, 8 },
};

/* An arena: q, k and v of a token in one row, as the trainer has them. */
enum part { FIRST, QKV, O, LSE, D_O, D_QKV, SCRATCH, PARTS };
struct layout {
    uint64_t at[PARTS + 1], size[PARTS]; /* bytes */
    uint64_t tokens, q, k, row;
};
#define SCRATCH_BYTES ((uint64_t)4 << 20)

static struct layout layout_of(const struct shape *s)
{
    struct layout l = { .tokens = s->n_seq * s->seq, .q = s->heads * s->dim, .k = s->kv_heads * s->dim };
    l.row = l.q + 2 * l.k;
    const uint64_t w = ops_dtype_bytes(s->at), g = ops_dtype_bytes(ops_wide(s->at, s->grad_wide));
    const uint64_t size[PARTS] = { l.tokens * 4,     l.tokens * l.row * w, l.tokens * l.q * w,  l.tokens * s->heads * 4,
                                   l.tokens * l.q * g, l.tokens * l.row * g, SCRATCH_BYTES };
    for (int i = 0; i < PARTS; i++) l.size[i] = size[i], l.at[i + 1] = l.at[i] + (size[i] + 255) / 256 * 256;
    return l;
}

static struct ops_attention attention_of(const struct shape *s, const struct layout *l, uint8_t *arena)
{
    const uint64_t w = ops_dtype_bytes(s->at), g = ops_dtype_bytes(ops_wide(s->at, s->grad_wide));
    uint8_t *qkv = arena + l->at[QKV], *d = arena + l->at[D_QKV];
    return (struct ops_attention){
        .n_seq = s->n_seq, .seq = s->seq, .heads = s->heads, .kv_heads = s->kv_heads, .head_dim = s->dim,
        .q_stride = l->row, .k_stride = l->row, .v_stride = l->row, .o_stride = l->q, .at = s->at,
        .grad_wide = s->grad_wide, .scale = 0.4f, .first_key = (int32_t *)(void *)(arena + l->at[FIRST]), .q = qkv,
        .k = qkv + l->q * w, .v = qkv + (l->q + l->k) * w, .o = arena + l->at[O],
        .lse = (float *)(void *)(arena + l->at[LSE]), .d_o = arena + l->at[D_O], .dq = d, .dk = d + l->q * g,
        .dv = d + (l->q + l->k) * g, .scratch = { arena + l->at[SCRATCH], SCRATCH_BYTES },
    };
}

static uint8_t *fill(const struct shape *s, const struct layout *l)
{
    uint8_t *image = kt_alloc(l->at[PARTS]);
    const enum ops_dtype g = ops_wide(s->at, s->grad_wide);
    kt_reseed(s->seq * 131 + s->heads);
    int32_t *first = (int32_t *)(void *)(image + l->at[FIRST]);
    for (uint64_t i = 0; i < l->tokens; i++) {
        const uint64_t t = i % s->seq, from = s->document ? t / s->document * s->document : 0,
                       limit = s->window && t >= s->window ? t - s->window + 1 : 0;
        first[i] = (int32_t)(from > limit ? from : limit);
    }
    for (uint64_t i = 0; i < l->tokens * l->row; i++) kt_put(s->at, image + l->at[QKV], i, 1.5 * kt_uniform());
    for (uint64_t i = 0; i < l->tokens * l->q; i++) kt_put(g, image + l->at[D_O], i, kt_uniform());
    return image;
}

static stk_status run_on(struct dev_stream *s, const struct shape *p, const struct layout *l, uint8_t *arena, uint8_t *image,
                         struct stk_error *err)
{
    const struct ops_attention a = attention_of(p, l, arena);
    for (int i = 0; i < SCRATCH; i++)
        if (i == FIRST || i == QKV || i == D_O)
            STK_TRY(dev_copy(s, arena + l->at[i], image + l->at[i], l->size[i], DEV_TO_DEVICE, err));
    STK_TRY(ops_attention_forward(s, &a, err));
    STK_TRY(ops_attention_backward(s, &a, err));
    for (int i = 0; i < SCRATCH; i++)
        if (i == O || i == LSE || i == D_QKV)
            STK_TRY(dev_copy(s, image + l->at[i], arena + l->at[i], l->size[i], DEV_TO_HOST, err));
    return dev_sync(s, err);
}

static void on_host(const struct shape *p, const struct layout *l, uint8_t *image)
{
    struct exec *ex;
    struct dev *d;
    struct dev_stream *s;
    struct stk_error err = { 0 };
    void *arena;
    struct dev_cfg cfg = { .kind = DEV_HOST_DISCRETE, .memory_bytes = l->at[PARTS], .matmul = DEV_MATMUL_F32,
                           .compute_threads = 1 };
    CHECK_OK(exec_open_threads(&ex, &err), &err);
    cfg.ex = ex;
    CHECK_OK(dev_open(&cfg, &d, &err), &err);
    CHECK_OK(dev_reserve(d, l->at[PARTS], &arena, &err), &err);
    CHECK_OK(dev_stream_open(d, "host", 0, &s, &err), &err);
    CHECK_OK(run_on(s, p, l, arena, image, &err), &err);
    dev_stream_close(s);
    dev_close(d);
    exec_close(ex);
}

/* Both directions in prepare mode, as a client does before it reserves. */
static void prepare(struct rig *r, const struct shape *p, const struct layout *l)
{
    const struct ops_attention a = attention_of(p, l, NULL);
    uint64_t scratch = 0;
    dev_prepare_begin(r->d);
    CHECK_OK(ops_attention_forward(r->s, &a, &r->err), &r->err);
    CHECK_OK(ops_attention_backward(r->s, &a, &r->err), &r->err);
    CHECK_OK(dev_prepare_end(r->d, &scratch, &r->err), &r->err);
    CHECK(scratch <= SCRATCH_BYTES);
}

static void open_card(struct rig *r, const struct shape *p, uint64_t seed)
{
    rig_world(r, EXEC_SIM, seed, (struct standin_cfg){ .cc_major = p->cc_major, .cc_minor = p->cc_major == 7 ? 5 : 0 });
    CHECK_OK(rig_device(r, DEV_MATMUL_AUTO, 0), &r->err);
}

static void on_card(const struct shape *p, const struct layout *l, uint64_t seed, bool prepared, char key[160],
                    uint64_t *executed, uint8_t *image)
{
    struct rig r;
    void *arena;
    struct dev_caps caps;
    open_card(&r, p, seed);
    if (prepared) prepare(&r, p, l);
    CHECK_OK(dev_reserve(r.d, l->at[PARTS], &arena, &r.err), &r.err);
    CHECK_OK(dev_host_register(r.d, image, l->at[PARTS], &r.err), &r.err);
    struct standin_counts before, after;
    const uint64_t checked = standin_calls_of("cudnnBackendExecute");
    standin_counts_read(&before);
    CHECK_OK(run_on(r.s, p, l, arena, image, &r.err), &r.err);
    standin_counts_read(&after);
    CHECK(after.allocations == before.allocations);
    *executed = standin_calls_of("cudnnBackendExecute") - checked;
    dev_caps_read(r.d, &caps);
    memcpy(key, caps.numerics, 160);
    RIG_CLOSE(&r);
}

static bool near(const struct shape *s, const struct layout *l, const uint8_t *got, const uint8_t *want)
{
    static const struct { enum part part; const char *name; double ulps; } checked[] = { { O, "o", 3 }, { LSE, "lse", 1 }, { D_QKV, "dqkv", 8 } };
    for (size_t c = 0; c < sizeof checked / sizeof checked[0]; c++) {
        const enum part part = checked[c].part;
        const enum ops_dtype t = part == LSE ? OPS_F32 : part == O ? s->at : ops_wide(s->at, s->grad_wide);
        const uint64_t n = part == LSE ? l->tokens * s->heads : l->tokens * (part == O ? l->q : l->row);
        const void *a = got + l->at[part], *b = want + l->at[part];
        double size = 0;
        for (uint64_t i = 0; i < n; i++)
            if (fabs(kt_get(t, b, i)) > size) size = fabs(kt_get(t, b, i));
        const double unit = part == LSE ? 0x1p-16 : 0x1p-8;
        for (uint64_t i = 0; i < n; i++) {
            if (kt_near(kt_get(t, a, i), kt_get(t, b, i), checked[c].ulps * unit * (size + 0x1p-6))) continue;
            printf("# %s: element %d is %.9g, not %.9g\n", checked[c].name, (int)i, kt_get(t, a, i), kt_get(t, b, i));
            return false;
        }
    }
    return true;
}

static void compare(const struct shape *s, bool prepared, bool tiles)
{
    const struct layout l = layout_of(s);
    uint8_t *want = fill(s, &l), *a = fill(s, &l), *b = fill(s, &l);
    char key[2][160];
    uint64_t executed[2];
    kt_worst = 0;
    on_host(s, &l, want);
    on_card(s, &l, test_seed(), prepared, key[0], &executed[0], a);
    on_card(s, &l, test_seed() + 1, prepared, key[1], &executed[1], b);
    CHECK(memcmp(a, b, l.at[SCRATCH]) == 0 && strcmp(key[0], key[1]) == 0);
    CHECK(near(s, &l, a, want));
    CHECK((executed[0] == 0) == tiles && executed[0] == executed[1]);
    CHECK((strstr(key[0], "attention=tiles") != NULL) == tiles && (strstr(key[0], "attention=cudnn91900-") != NULL) == !tiles);
    printf("# %d x %d tokens, %d/%d heads of %d: %d runs, %.2f of the bound, %s\n", (int)s->n_seq, (int)s->seq, (int)s->heads,
           (int)s->kv_heads, (int)s->dim, (int)executed[0], kt_worst, strstr(key[0], "attention="));
    free(want);
    free(a);
    free(b);
}

TEST(cuda_dnn_attention_equals_the_hosts)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) compare(&shapes[i], true, false);
}

TEST(cuda_dnn_is_not_asked_for_what_it_has_not)
{
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) compare(&own[i], true, true);
}

TEST(cuda_dnn_unprepared_shapes_get_own_tiles) { compare(&shapes[1], false, true); }

TEST(cuda_dnn_absent_library_gets_own_tiles)
{
    char text[320];
    struct rig r;
    dnn_table_hide(true);
    compare(&shapes[1], true, true);
    rig_world(&r, EXEC_SIM, test_seed(), (struct standin_cfg){ 0 });
    CHECK_OK(dev_describe(DEV_CUDA, text, sizeof text, &r.err), &r.err);
    printf("# %s\n", text);
    CHECK(strstr(text, ", no cuDNN (hidden by a test)"));
    dnn_table_hide(false);
    CHECK_OK(dev_describe(DEV_CUDA, text, sizeof text, &r.err), &r.err);
    CHECK(strstr(text, ", cuDNN 9.19.0"));
    standin_close_sim();
    exec_close(r.ex);
}

/* A call that fails while preparing is named in the key, and own tiles go on; one at a launch ends the run with it. */
TEST(cuda_dnn_calls_that_fail_are_named)
{
    static const char *const calls[] = { "cudnnCreate", "cudnnBackendCreateDescriptor", "cudnnBackendSetAttribute",
                                         "cudnnBackendFinalize", "cudnnBackendGetAttribute", "cudnnSetStream", "cudnnBackendExecute" };
    const struct shape *s = &shapes[1];
    const struct layout l = layout_of(s);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (int late = i >= 5; late < (i == 0 ? 1 : 2); late++) {
            struct rig r;
            struct dev_caps caps;
            void *arena;
            char named[64];
            uint8_t *image = fill(s, &l);
            if (late && !strcmp(calls[i], "cudnnBackendGetAttribute")) { free(image); continue; } /* none at a launch */
            rig_world(&r, EXEC_SIM, test_seed(), (struct standin_cfg){ 0 });
            if (!late) standin_fail(calls[i], 1, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED);
            CHECK_OK(rig_device(&r, DEV_MATMUL_AUTO, 0), &r.err);
            prepare(&r, s, &l);
            dev_caps_read(r.d, &caps);
            snprintf(named, sizeof named, ",%s:4003", calls[i]);
            CHECK((strstr(caps.numerics, named) != NULL) == !late);
            CHECK_OK(dev_reserve(r.d, l.at[PARTS], &arena, &r.err), &r.err);
            CHECK_OK(dev_host_register(r.d, image, l.at[PARTS], &r.err), &r.err);
            if (late) standin_fail(calls[i], 1, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED);
            stk_status st = run_on(r.s, s, &l, arena, image, &r.err);
            CHECK(late ? st == STK_ERR_DEVICE && strstr(r.err.text, calls[i]) && strstr(r.err.text, "4003") : st == STK_OK);
            if (late) printf("# %s\n", r.err.text);
            RIG_CLOSE(&r);
            free(image);
        }
}

/* Any call while opening and preparing: nothing leaks, nobody waits for ever, and what is computed is right. */
TEST(cuda_dnn_any_call_may_fail_in_prepare_mode)
{
    const struct shape *s = &shapes[1];
    const struct layout l = layout_of(s);
    uint64_t n = 1 + test_seed() % 97, tried = 0, tiles = 0;
    for (bool more = true; more; n += 97, tried++) {
        struct rig r;
        struct dev_caps caps;
        uint64_t scratch;
        const struct ops_attention a = attention_of(s, &l, NULL);
        rig_world(&r, EXEC_SIM, test_seed(), (struct standin_cfg){ 0 });
        standin_fail(NULL, n, cudaErrorUnknown);
        stk_status st = rig_device(&r, DEV_MATMUL_AUTO, 0);
        if (st == STK_OK) {
            dev_prepare_begin(r.d);
            st = ops_attention_forward(r.s, &a, &r.err);
            if (st == STK_OK) st = ops_attention_backward(r.s, &a, &r.err);
            if (dev_prepare_end(r.d, &scratch, &r.err) != STK_OK && st == STK_OK) st = STK_ERR_DEVICE;
            dev_caps_read(r.d, &caps);
            tiles += strstr(caps.numerics, "attention=tiles") != NULL || strchr(strstr(caps.numerics, "attention="), ',') != NULL;
        }
        more = standin_failed_call() != NULL;
        CHECK(more || st == STK_OK);
        CHECK(st == STK_OK || (r.err.code != STK_OK && strstr(r.err.text, standin_failed_call())));
        RIG_CLOSE(&r);
    }
    printf("# %d of some thousand calls, own tiles after %d of them\n", (int)tried, (int)tiles);
    CHECK(tried > 10 && tiles > tried / 2);
}

/* A library whose numbers are wrong here, or differ from run to run, is not used, and the key says so. */
TEST(cuda_dnn_wrong_results_are_found_before_a_run)
{
    const struct shape *s = &shapes[1];
    const struct layout l = layout_of(s);
    for (int how = STANDIN_DNN_RIGHT; how <= STANDIN_DNN_LOOSE; how++) {
        struct rig r;
        struct dev_caps caps;
        rig_world(&r, EXEC_SIM, test_seed(), (struct standin_cfg){ 0 });
        standin_dnn((enum standin_dnn)how);
        CHECK_OK(rig_device(&r, DEV_MATMUL_AUTO, 0), &r.err);
        prepare(&r, s, &l);
        dev_caps_read(r.d, &caps);
        printf("# %s\n", strstr(caps.numerics, "attention="));
        CHECK((strstr(caps.numerics, "attention=tiles,check:0") != NULL) == (how != STANDIN_DNN_RIGHT));
        CHECK((strstr(caps.numerics, "attention=cudnn91900-") != NULL) == (how == STANDIN_DNN_RIGHT));
        RIG_CLOSE(&r);
    }
}

/* --- the stand-in's own rules */

static cudnnStatus_t set_tensor(cudnnBackendDescriptor_t d, int without)
{
    const int64_t n[4] = { 1, 2, 3, 8 }, stride[4] = { 48, 24, 8, 1 }, uid = 1, align = 16;
    const cudnnDataType_t type = CUDNN_DATA_BFLOAT16;
    cudnnStatus_t st = CUDNN_STATUS_SUCCESS;
#define SET(i, name, type_, count, value) \
    if (without != i && st == CUDNN_STATUS_SUCCESS) st = cudnnBackendSetAttribute(d, CUDNN_ATTR_TENSOR_##name, CUDNN_TYPE_##type_, count, value);
    SET(0, DATA_TYPE, DATA_TYPE, 1, &type)
    SET(1, DIMENSIONS, INT64, 4, n)
    SET(2, STRIDES, INT64, 4, stride)
    SET(3, UNIQUE_ID, INT64, 1, &uid)
    SET(4, BYTE_ALIGNMENT, INT64, 1, &align)
#undef SET
    return st;
}

TEST(cuda_dnn_standin_is_strict)
{
    struct rig r;
    cudnnBackendDescriptor_t d, op;
    const int64_t number = 1;
    rig_world(&r, EXEC_SIM, test_seed(), (struct standin_cfg){ 0 });
    for (int without = 0; without <= 5; without++) {
        CHECK(cudnnBackendCreateDescriptor(CUDNN_BACKEND_TENSOR_DESCRIPTOR, &d) == CUDNN_STATUS_SUCCESS);
        CHECK(set_tensor(d, without) == CUDNN_STATUS_SUCCESS);
        CHECK(cudnnBackendFinalize(d) == (without < 5 ? CUDNN_STATUS_BAD_PARAM : CUDNN_STATUS_SUCCESS));
        if (without == 5) break;
        CHECK(cudnnBackendDestroyDescriptor(d) == CUDNN_STATUS_SUCCESS);
    }
    CHECK(cudnnBackendFinalize(d) == CUDNN_STATUS_BAD_PARAM);
    CHECK(set_tensor(d, 5) == CUDNN_STATUS_BAD_PARAM);
    CHECK(cudnnBackendCreateDescriptor(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &op) == CUDNN_STATUS_SUCCESS);
    CHECK(cudnnBackendSetAttribute(op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, CUDNN_TYPE_INT64, 1, &number) ==
          CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE);
    CHECK(cudnnBackendSetAttribute(op, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &number) == CUDNN_STATUS_BAD_PARAM);
    CHECK(cudnnBackendSetAttribute(op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &d) ==
          CUDNN_STATUS_SUCCESS);
    CHECK(cudnnBackendSetAttribute(op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &op) ==
          CUDNN_STATUS_SUCCESS);
    CHECK(cudnnBackendFinalize(op) == CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
    CHECK(cudnnBackendDestroyDescriptor(op) == CUDNN_STATUS_SUCCESS);
    CHECK(cudnnBackendDestroyDescriptor(d) == CUDNN_STATUS_SUCCESS);
    standin_close_sim();
    exec_close(r.ex);
}

/* An argument that is aligned to 2 bytes only is refused before cuDNN is asked. */
TEST(cuda_dnn_misaligned_tensors_are_refused)
{
    const struct shape *s = &shapes[0];
    const struct layout l = layout_of(s);
    struct rig r;
    void *arena;
    open_card(&r, s, test_seed());
    prepare(&r, s, &l);
    CHECK_OK(dev_reserve(r.d, l.at[PARTS], &arena, &r.err), &r.err);
    struct ops_attention a = attention_of(s, &l, arena);
    a.o = (uint8_t *)a.o + 2;
    stk_status st = ops_attention_forward(r.s, &a, &r.err);
    if (st == STK_OK) st = dev_sync(r.s, &r.err);
    CHECK(st == STK_ERR_DEVICE && strstr(r.err.text, "16 bytes"));
    RIG_CLOSE(&r);
}
