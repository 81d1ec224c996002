/* gpu/device_impl.h - for the writer of a backend: the table a backend fills, and the record of one
 * queued command.
 *
 * gpu/device.c and gpu/ops.c are the front: they check arguments and shapes, so that a backend sees
 * only possible ones, turn each call into one `struct dev_cmd` (a copy of the arguments) and hand
 * it to the table. A backend is one `struct dev_ops`, found by its kind in device.c. Callers above
 * never include this file.
 *
 * A BACKEND MUST
 *  - embed `struct dev` as the first member of its device and `struct dev_stream` as the first
 * member of its stream;
 *  - run the commands of one stream in order, later than the call; streams among each other in any
 * order the marks allow;
 *  - keep the first error of queued work (status_read), skip later work, and still run NOTIFY,
 * MARK_RECORD and MARK_WAIT;
 *  - allocate nothing in enqueue;
 *  - check of its own: whether pointers are on the device at all (the front cannot know).
 *
 * To write a new one start from gpu/host/host_dev.c (device, memory) and gpu/host/host_stream.c
 * (streams). */
#ifndef GPU_DEVICE_IMPL_H
#define GPU_DEVICE_IMPL_H

#include "base/convert.h"
#include "gpu/device.h"
#include "gpu/ops.h"
#include <stdatomic.h>

#define DEV_OPS_VERSION 1
#define DEV_STREAM_DEPTH_DEFAULT 512
#define DEV_STREAM_DEPTH_MAX 65536

/* X(enumerator, field of the union, what a person calls it). Commands from LINEAR_FORWARD on are
 * operations of gpu/ops.h. */
#define DEV_CMD_MAP(X)                                                  \
    X(DEV_CMD_COPY, copy, "copy")                                       \
    X(DEV_CMD_ZERO, zero, "zero")                                       \
    X(DEV_CMD_NOTIFY, notify, "notify")                                 \
    X(DEV_CMD_MARK_RECORD, mark, "mark_record")                         \
    X(DEV_CMD_MARK_WAIT, mark, "mark_wait")                             \
    X(DEV_CMD_LINEAR_FORWARD, linear, "linear_forward")                 \
    X(DEV_CMD_LINEAR_BACKWARD_DATA, linear, "linear_backward_data")     \
    X(DEV_CMD_LINEAR_BACKWARD_WEIGHT, linear, "linear_backward_weight") \
    X(DEV_CMD_EMBED_FORWARD, embed, "embed_forward")                    \
    X(DEV_CMD_EMBED_BACKWARD, embed, "embed_backward")                  \
    X(DEV_CMD_RMSNORM_FORWARD, rmsnorm, "rmsnorm_forward")              \
    X(DEV_CMD_RMSNORM_BACKWARD, rmsnorm, "rmsnorm_backward")            \
    X(DEV_CMD_ROPE, rope, "rope")                                       \
    X(DEV_CMD_ATTENTION_FORWARD, attention, "attention_forward")        \
    X(DEV_CMD_ATTENTION_BACKWARD, attention, "attention_backward")      \
    X(DEV_CMD_SWIGLU_FORWARD, swiglu, "swiglu_forward")                 \
    X(DEV_CMD_SWIGLU_BACKWARD, swiglu, "swiglu_backward")               \
    X(DEV_CMD_ADD, add, "add")                                          \
    X(DEV_CMD_HEAD_FORWARD, head, "head_forward")                       \
    X(DEV_CMD_HEAD_TRAIN, head, "head_train")                           \
    X(DEV_CMD_GRAD_CAST, grad_cast, "grad_cast")                        \
    X(DEV_CMD_ACC_ADD, acc_add, "acc_add")                              \
    X(DEV_CMD_ADAM, adam, "adam")

enum dev_cmd_kind {
#define DEV_CMD_ENUM(name, field, text) name,
    DEV_CMD_MAP(DEV_CMD_ENUM)
#undef DEV_CMD_ENUM
        DEV_CMD_N
};

struct dev_cmd_copy {
    void *dst;
    const void *src;
    uint64_t size_bytes;
    enum dev_dir dir;
    double bytes_per_s; /* at most; 0: as fast as it goes */
};
struct dev_cmd_zero {
    void *dst;
    uint64_t size_bytes;
};
struct dev_cmd_notify {
    struct exec_lane *lane;
    struct exec_task *task;
    struct exec_event *ev;
};
struct dev_cmd_mark {
    struct dev_mark *mark;
    uint64_t value; /* the record that was the latest at the call */
};
struct dev_cmd_add {
    uint64_t n;
    enum ops_dtype at;
    const void *a, *b;
    void *y;
};
struct dev_cmd_acc_add {
    uint64_t n;
    float *acc;
    const void *src;
    enum ops_dtype st;
};

/* One queued command. Arguments are copies; the buffers they point to are borrowed. */
struct dev_cmd {
    enum dev_cmd_kind kind;
    union {
        struct dev_cmd_copy copy;
        struct dev_cmd_zero zero;
        struct dev_cmd_notify notify;
        struct dev_cmd_mark mark;
        struct dev_cmd_add add;
        struct dev_cmd_acc_add acc_add;
        struct ops_linear linear;
        struct ops_embed embed;
        struct ops_rmsnorm rmsnorm;
        struct ops_rope rope;
        struct ops_attention attention;
        struct ops_swiglu swiglu;
        struct ops_head head;
        struct ops_grad_cast grad_cast;
        struct ops_adam adam;
    } u;
};
_Static_assert(sizeof(struct dev_cmd) <= 256, "a queue's slot is bounded");

const char *dev_cmd_name(enum dev_cmd_kind kind);

/* --- operands of a command (gpu/spans.c); pure ------------------------------------------------- */

#define DEV_SPANS_MAX 16
enum dev_side { DEV_SIDE_DEVICE, DEV_SIDE_HOST, DEV_SIDE_SCRATCH };
struct dev_span {
    const char *name;
    const void *p;
    uint64_t size_bytes;
    enum dev_side side;
};
/* Every buffer a command touches (options that are off are left out); returns how many. */
uint32_t dev_spans(const struct dev_cmd *cmd, struct dev_span *out);
/* Each span must lie inside the arena, or outside of it where it is the host's. STK_ERR_DEVICE
 * names op and operand. */
stk_status dev_check_spans(const void *arena, uint64_t arena_bytes, const struct dev_cmd *cmd,
                           struct stk_error *err);
/* FLOPs of a command (0: bound by memory) and bytes of its operands on the device, each once. */
double dev_cmd_flops(const struct dev_cmd *cmd);
double dev_cmd_bytes(const struct dev_cmd *cmd);

/* All entries but the last are required. Thread and blocking as the public call of the same
 * name in gpu/device.h says. */
struct dev_ops {
    uint32_t version; /* DEV_OPS_VERSION the backend was written for */
    const char *name;
    stk_status (*open)(const struct dev_cfg *cfg, struct dev **out,
                       struct stk_error *err); /* fills dev->caps */
    void (*close)(struct dev *d);
    stk_status (*reserve)(struct dev *d, uint64_t size_bytes, void **out, struct stk_error *err);
    stk_status (*host_register)(struct dev *d, void *base, uint64_t size_bytes,
                                struct stk_error *err);
    void (*host_unregister)(struct dev *d, void *base);
    stk_status (*status_read)(const struct dev *d, struct stk_error *err);
    /* Sets (*out)->dev and ->name. */
    stk_status (*stream_open)(struct dev *d, const char *name, uint32_t depth,
                              struct dev_stream **out, struct stk_error *err);
    void (*stream_close)(struct dev_stream *s);
    uint64_t (*stream_busy_ns)(const struct dev_stream *s);
    /* Queues a copy of `cmd`. The full queue: the application's thread waits, a lane gets STK_BUSY
     * and nothing is queued. */
    stk_status (*enqueue)(struct dev_stream *s, const struct dev_cmd *cmd, struct stk_error *err);
    /* Makes what the operation will need (primitives, tuned choices); *scratch_bytes: what it
     * needs. Runs nothing; pointers in `cmd` may be NULL except that a NULL optional one means the
     * option is off. */
    stk_status (*prepare)(struct dev *d, const struct dev_cmd *cmd, uint64_t *scratch_bytes,
                          struct stk_error *err);
    uint32_t (*work_read)(const struct dev *d, struct dev_work out[DEV_WORK_MAX]);
    stk_status (*mark_init)(struct dev *d, struct dev_mark *m, struct stk_error *err);
    void (*mark_free)(struct dev_mark *m);
    /* Modelled time of a command and the figures behind it; NULL where time is real. */
    uint64_t (*model_ns)(const struct dev *d, const struct dev_cmd *cmd);
    void (*model_read)(const struct dev *d, struct dev_model *out);
    /* Sets caps.matmul_flops_per_s, which is 0; NULL: there is nothing to measure. */
    stk_status (*matmul_rate)(struct dev *d, struct stk_error *err);
    /* dev_describe; NULL: the name alone. dev_work_measure; NULL: always measured. */
    stk_status (*describe)(char *text, size_t text_bytes, struct stk_error *err);
    void (*work_measure)(struct dev *d, bool on);
};

/* Sums of one kind of work, and its row of dev_work_read. Any thread. */
struct dev_tally {
    _Atomic uint64_t calls, ns, flops, bytes;
};
void dev_tally_add(struct dev_tally *t, uint64_t ns, double flops, double bytes);
/* False: never run, so no row. */
bool dev_tally_row(const struct dev_tally *t, const char *what, struct dev_work *out);

struct dev {
    const struct dev_ops *ops;
    struct exec *ex;
    struct dev_caps caps;
    bool preparing; /* application's thread only */
    uint64_t prepare_scratch_bytes, prepare_ns;
    struct exec_event sync; /* dev_sync's; one waiter at a time */
};

struct dev_stream {
    struct dev *dev;
    char name[16];
};

extern const struct dev_ops
    host_dev_ops; /* gpu/host/host_dev.c: DEV_HOST, DEV_HOST_DISCRETE, DEV_SIM */
#ifdef STK_CUDA
extern const struct dev_ops cuda_dev_ops; /* gpu/cuda/cuda_dev.c: DEV_CUDA */
#endif

/* ops.c to device.c: prepares or queues one checked operation. */
stk_status dev_submit(struct dev_stream *s, const struct dev_cmd *cmd, struct stk_error *err);

#endif
