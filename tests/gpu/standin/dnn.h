/* tests/gpu/standin/dnn.h - private to dnn.cpp (descriptors, heuristics) and dnn_run.cpp (graphs as numbers). Under
 * card_lock. */
#ifndef TESTS_STANDIN_DNN_H
#define TESTS_STANDIN_DNN_H

#include "card.h"
#include <cudnn.h>

struct dnn_tensor {
    int64_t uid = 0, align = 1, n[4] = {}, stride[4] = {};
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    bool is_virtual = false, by_value = false;
};

enum dnn_op_kind { DNN_POINTWISE, DNN_PRODUCT, DNN_REDUCE, DNN_RESHAPE };
struct dnn_op {
    dnn_op_kind kind;
    int mode = 0;            /* of a pointwise operation, of a reduction */
    int64_t axis = -1;
    int64_t x = 0, b = 0, t = 0, y = 0; /* uids; 0: none */
};
struct dnn_program { /* a finalized graph */
    std::map<int64_t, dnn_tensor> tensor; /* by uid */
    std::vector<dnn_op> op;
};
struct dnn_job {
    dnn_program p;
    std::map<int64_t, void *> memory;
    std::map<int64_t, float> value; /* of tensors by value, read when the job was queued */
    char *workspace = nullptr;
    uint64_t workspace_bytes = 0;
    float factor = 1; /* of all results: not 1 where they are to be wrong */
};
/* Why the program cannot be: NULL, or a sentence. */
const char *dnn_program_check(const dnn_program &p);
uint64_t dnn_program_flops(const dnn_program &p);
void dnn_job_effect(card_op &op, const dnn_job &j);

uint64_t dnn_live(void);
void dnn_reset(void);

#endif
